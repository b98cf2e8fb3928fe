// XLA FFI handlers for CPUs: decode a call, check it, and run the rank's part on threads of its own. A handler returns
// a Future at once, because one that blocked would deadlock as soon as a program has two independent calls.
#include "xla/cpu_handlers.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <string>
#include <thread>

#include "host/executor.h"
#include "xla/bindings.h"

namespace mok::xla_ffi {
// One per call site of a loaded program, shared by all its devices: what tells two calls of one run apart.
struct CallSite {
  static ffi::TypeId id;
  int64_t number;
};
ffi::TypeId CallSite::id = {};

namespace {

ffi::ErrorOr<std::unique_ptr<CallSite>> instantiate() {
  static std::atomic<int64_t> next{0};
  return std::make_unique<CallSite>(CallSite{next++});
}

ffi::Future failed(const std::string& text) {
  ffi::Promise promise;
  ffi::Future future(promise);
  promise.SetError(ffi::Error::Internal("mok_jax: " + text));
  return future;
}

host::Options options_of(const Attributes& a) {
  const int64_t cores = std::max(1u, std::thread::hardware_concurrency());
  const auto chosen = [](int32_t value, int64_t otherwise) {
    return value > 0 ? value : static_cast<int32_t>(std::max<int64_t>(1, otherwise));
  };
  return {chosen(a.communication_workers, 1), chosen(a.compute_workers, cores / a.ranks),
          static_cast<uint64_t>(a.delay_seed), a.entry_timeout_s, a.timeout_s};
}

// Two waves of gate and up tiles over the workers, unless the caller chose.
int64_t minibatch_rows(const Attributes& a, const Shape& shape) {
  if (a.minibatch_rows > 0) return a.minibatch_rows;
  return kRowBlock * ceil_div(2 * options_of(a).compute_workers, host::tile_counts(shape).gate_up);
}

Shape shape_of(const Attributes& a, const Buffer& x, const Buffer& ids, const Buffer& wi_0, const Buffer& where) {
  Shape shape{a.ranks,
              where.typed_data<int32_t>()[0],
              x.dimensions()[0],
              ids.dimensions()[1],
              x.dimensions()[1],
              wi_0.dimensions()[2],
              wi_0.dimensions()[0],
              a.ring_rows,
              0};
  shape.minibatch_rows = minibatch_rows(a, shape);
  return shape;
}

// Runs `call` on a thread of its own. The group is joined here, on the caller's thread, since that is program order.
template <class T>
ffi::Future launch(const host::Call<T>& call, const Attributes& a, CallSite* site, ffi::RunId run,
                   int32_t group_number) {
  const host::Groups::Key key{site->number, run.run_id, group_number};
  auto group =
      host::Groups::instance().join(key, call.shape.rank, call.shape.ranks, ArenaLayout(call.shape, sizeof(T)).bytes);
  ffi::Promise promise;
  ffi::Future future(promise);
  std::thread([call, group, options = options_of(a), promise]() mutable {
    const auto error = host::execute(call, *group, options);
    group.reset();
    if (error) {
      promise.SetError(ffi::Error::Internal("mok_jax: " + *error));
    } else {
      promise.SetAvailable();
    }
  }).detach();
  return future;
}

// Calls visit with a null pointer of x's element type.
template <class Visit>
ffi::Future with_element_type(const Buffer& x, const Visit& visit) {
  if (x.element_type() == ffi::F32) return visit(static_cast<float*>(nullptr));
  if (x.element_type() == ffi::BF16) return visit(static_cast<host::BFloat16*>(nullptr));
  return failed("x must be float32 or bfloat16");
}

ffi::Future forward(CallSite* site, ffi::RunId run, Buffer x, Buffer expert_ids, Buffer expert_weights, Buffer wi_0,
                    Buffer wi_1, Buffer wo, Buffer where, Result y, Result row_table, Result expert_rows,
                    Result bad_tokens, Result pre_activations, Result rows, Result hidden, Result, Attributes a) {
  return with_element_type(x, [&]<class T>(T*) {
    host::Call<T> call{};
    call.direction = Direction::forward;
    call.shape = shape_of(a, x, expert_ids, wi_0, where);
    call.save = static_cast<Save>(a.save);
    call.activation = {static_cast<Activation>(a.activation), a.activation_limit};
    call.inputs = {data<T>(x), nullptr, data<int32_t>(expert_ids), data<float>(expert_weights)};
    call.routing = {data<RowSource>(row_table), data<int32_t>(expert_rows), data<int32_t>(bad_tokens)};
    host::Buffers<T>& b = call.buffers;
    b.wi_0 = data<T>(wi_0);
    b.wi_1 = data<T>(wi_1);
    b.wo = data<T>(wo);
    b.rows = data<T>(rows);
    b.pre_activations = pre_activations->element_count() ? data<T>(pre_activations) : nullptr;
    b.hidden = data<T>(hidden);
    b.out = data<T>(y);
    return launch(call, a, site, run, where.typed_data<int32_t>()[1]);
  });
}

ffi::Future backward(CallSite* site, ffi::RunId run, Buffer x, Buffer expert_ids, Buffer expert_weights, Buffer wi_0,
                     Buffer wi_1, Buffer wo, Buffer where, Buffer dy, Buffer row_table, Buffer expert_rows,
                     Buffer saved_pre_activations, Buffer saved_rows, Result dx, Result router_grads, Result wi_0_grad,
                     Result wi_1_grad, Result wo_grad, Result rows, Result grads, Result pre_activations, Result hidden,
                     Result gate_up_grads, Result row_weights, Result router_parts, Result straddle, Result,
                     Attributes a) {
  return with_element_type(x, [&]<class T>(T*) {
    host::Call<T> call{};
    call.direction = Direction::backward;
    call.shape = shape_of(a, x, expert_ids, wi_0, where);
    call.save = static_cast<Save>(a.save);
    call.activation = {static_cast<Activation>(a.activation), a.activation_limit};
    call.inputs = {data<T>(x), data<T>(dy), data<int32_t>(expert_ids), data<float>(expert_weights)};
    call.routing = {data<RowSource>(row_table), data<int32_t>(expert_rows), nullptr};
    host::Buffers<T>& b = call.buffers;
    b.wi_0 = data<T>(wi_0);
    b.wi_1 = data<T>(wi_1);
    b.wo = data<T>(wo);
    b.rows = data<T>(rows);
    b.grads = data<T>(grads);
    b.pre_activations = data<T>(pre_activations);
    b.hidden = data<T>(hidden);
    b.gate_up_grads = data<T>(gate_up_grads);
    b.row_weights = data<float>(row_weights);
    b.router_parts = data<float>(router_parts);
    b.straddle = data<float>(straddle);
    b.saved_pre_activations = saved_pre_activations.element_count() ? data<T>(saved_pre_activations) : nullptr;
    b.saved_rows = saved_rows.element_count() ? data<T>(saved_rows) : nullptr;
    b.out = data<T>(dx);
    b.router_grads = data<float>(router_grads);
    b.wi_0_grad = wi_0_grad->untyped_data();
    b.wi_1_grad = wi_1_grad->untyped_data();
    b.wo_grad = wo_grad->untyped_data();
    b.grads_in_f32 = wi_0_grad->element_type() == ffi::F32;
    return launch(call, a, site, run, where.typed_data<int32_t>()[1]);
  });
}

template <int operands, int results>
auto bind() {
  return with_buffers<operands, results>(ffi::Ffi::Bind().Ctx<ffi::State<CallSite>>().Ctx<ffi::RunId>());
}
auto bind_forward() { return bind<7, 8>(); }
auto bind_backward() { return bind<12, 14>(); }

}  // namespace
}  // namespace mok::xla_ffi

using mok::xla_ffi::CallSite;

XLA_FFI_DEFINE_HANDLER_SYMBOL(mok_cpu_instantiate, mok::xla_ffi::instantiate, xla::ffi::Ffi::BindInstantiate());
XLA_FFI_DEFINE_HANDLER_SYMBOL(mok_cpu_forward, mok::xla_ffi::forward, mok::xla_ffi::bind_forward());
XLA_FFI_DEFINE_HANDLER_SYMBOL(mok_cpu_backward, mok::xla_ffi::backward, mok::xla_ffi::bind_backward());

XLA_FFI_TypeId* mok_call_site_type_id() { return &CallSite::id; }
XLA_FFI_TypeInfo* mok_call_site_type_info() {
  static XLA_FFI_TypeInfo info = xla::ffi::MakeTypeInfo<CallSite>();
  return &info;
}
