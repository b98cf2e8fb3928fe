// XLA FFI handlers for CPUs: decode a call, check it, and run the rank's part on threads of its own. A handler returns
// a Future at once, because one that blocked would deadlock as soon as a program has two independent calls.
#include "ffi/cpu.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <string>
#include <thread>

#include "ffi/buffers.h"
#include "host/executor.h"

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
  return {.communication_workers = chosen(a.communication_workers, 1),
          .compute_workers = chosen(a.compute_workers, cores / a.ranks),
          .delay_seed = static_cast<uint64_t>(a.delay_seed),
          .entry_timeout_s = a.entry_timeout_s,
          .timeout_s = a.timeout_s};
}

// Two waves of gate and up tiles over the workers, unless the caller chose.
int64_t minibatch_rows(const Attributes& a, const Shape& shape) {
  if (a.minibatch_rows > 0) return a.minibatch_rows;
  return kRowBlock * ceil_div(2 * options_of(a).compute_workers, host::tile_counts(shape).gate_up);
}

// What both directions have alike.
template <class T>
host::Call<T> begin_call(Direction direction, const Operands<T>& in) {
  host::Call<T> call{};
  call.direction = direction;
  call.shape = in.shape;
  call.shape.rank = in.where[0];
  call.shape.minibatch_rows = minibatch_rows(in.attributes, in.shape);
  call.save = in.save;
  call.activation = {.kind = static_cast<Activation>(in.attributes.activation),
                     .limit = in.attributes.activation_limit};
  call.inputs = {.x = in.x, .dy = nullptr, .expert_ids = in.expert_ids, .expert_weights = in.expert_weights};
  call.buffers.wi_0 = in.wi_0;
  call.buffers.wi_1 = in.wi_1;
  call.buffers.wo = in.wo;
  return call;
}

// Runs `call` on a thread of its own. The group is joined here, on the caller's thread, since that is program order.
template <class T>
ffi::Future launch(const host::Call<T>& call, const Operands<T>& in, CallSite* site, ffi::RunId run) {
  const host::Groups::Key key{.call_site = site->number, .run = run.run_id, .group = in.where[1]};
  auto group =
      host::Groups::instance().join(key, call.shape.rank, call.shape.ranks, ArenaLayout(call.shape, sizeof(T)).bytes);
  ffi::Promise promise;
  ffi::Future future(promise);
  std::thread([call, group, options = options_of(in.attributes), promise]() mutable {
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

template <class T>
ffi::Future run(const Forward<T>& f, CallSite* site, ffi::RunId id) {
  host::Call<T> call = begin_call(Direction::forward, f.in);
  call.routing = {.row_table = f.row_table, .expert_rows = f.expert_rows, .bad_tokens = f.bad_tokens};
  call.buffers.rows = f.rows;
  call.buffers.pre_activations = f.pre_activations;
  call.buffers.hidden = f.hidden;
  call.buffers.out = f.y;
  return launch(call, f.in, site, id);
}

template <class T>
ffi::Future run(const Backward<T>& b, CallSite* site, ffi::RunId id) {
  host::Call<T> call = begin_call(Direction::backward, b.in);
  call.inputs.dy = b.dy;
  call.routing = {.row_table = b.row_table, .expert_rows = b.expert_rows, .bad_tokens = nullptr};
  call.buffers.rows = b.rows;
  call.buffers.grads = b.grads;
  call.buffers.pre_activations = b.pre_activations;
  call.buffers.hidden = b.hidden;
  call.buffers.gate_up_grads = b.gate_up_grads;
  call.buffers.row_weights = b.row_weights;
  call.buffers.router_parts = b.router_parts;
  call.buffers.straddle = b.straddle;
  call.buffers.saved_pre_activations = b.saved_pre_activations;
  call.buffers.saved_rows = b.saved_rows;
  call.buffers.out = b.dx;
  call.buffers.router_grads = b.router_grads;
  call.buffers.wi_0_grad = b.wi_0_grad;
  call.buffers.wi_1_grad = b.wi_1_grad;
  call.buffers.wo_grad = b.wo_grad;
  call.buffers.grads_in_f32 = b.grads_in_f32;
  return launch(call, b.in, site, id);
}

template <template <class> class Buffers>
ffi::Future execute(CallSite* site, ffi::RunId id, ffi::RemainingArgs operands, ffi::RemainingRets results,
                    ffi::Dictionary attributes) {
  try {
    Reader reader(Buffers<float>::kTarget, operands, results, attributes);
    if (reader.operand_type() == ffi::BF16) return run(reader.all<Buffers<host::BFloat16>>(), site, id);
    return run(reader.all<Buffers<float>>(), site, id);
  } catch (const WrongCall& wrong) {
    return failed(wrong.what());
  }
}

auto bind() {
  return ffi::Ffi::Bind().Ctx<ffi::State<CallSite>>().Ctx<ffi::RunId>().RemainingArgs().RemainingRets().Attrs();
}

}  // namespace
}  // namespace mok::xla_ffi

using mok::xla_ffi::CallSite;

XLA_FFI_DEFINE_HANDLER_SYMBOL(mok_cpu_instantiate, mok::xla_ffi::instantiate, xla::ffi::Ffi::BindInstantiate());
XLA_FFI_DEFINE_HANDLER_SYMBOL(mok_cpu_forward, mok::xla_ffi::execute<mok::xla_ffi::Forward>, mok::xla_ffi::bind());
XLA_FFI_DEFINE_HANDLER_SYMBOL(mok_cpu_backward, mok::xla_ffi::execute<mok::xla_ffi::Backward>, mok::xla_ffi::bind());

XLA_FFI_TypeId* mok_call_site_type_id() { return &CallSite::id; }
XLA_FFI_TypeInfo* mok_call_site_type_info() {
  static XLA_FFI_TypeInfo info = xla::ffi::MakeTypeInfo<CallSite>();
  return &info;
}
