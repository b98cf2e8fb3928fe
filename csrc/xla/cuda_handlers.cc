// XLA FFI handlers for GPUs. initialize makes the arena and loads every kernel; execute only launches, so that XLA can
// capture it in a command buffer.
#include "xla/cuda_handlers.h"

#include <optional>
#include <string>

#include "cuda/launch.h"
#include "xla/attributes.h"
#include "xla/bindings.h"

namespace mok::xla_ffi {
namespace {

using cuda::bf16;

ffi::Error to_error(const std::optional<std::string>& text) {
  return text ? ffi::Error::Internal("mok_jax: " + *text) : ffi::Error::Success();
}

// Measured on H200s: from 32 to 64 row blocks all is equal or better; 17 cost 8 % at H 7168, I 2048.
int64_t minibatch_rows(const Attributes& a) { return a.minibatch_rows > 0 ? a.minibatch_rows : 64 * kRowBlock; }

// Every array holds virtual_ranks ranks, one after the other; for one rank that is just its arrays.
Shape shape_of(const Attributes& a, const Buffer& x, const Buffer& ids, const Buffer& wi_0) {
  const int64_t here = a.virtual_ranks;
  return {a.ranks,
          0,
          x.dimensions()[0] / here,
          ids.dimensions()[1],
          x.dimensions()[1],
          wi_0.dimensions()[2],
          wi_0.dimensions()[0] / here,
          a.ring_rows,
          minibatch_rows(a)};
}

// Makes a call of either direction ready to be launched; reports what an earlier one ran into.
ffi::Error initialize(const Attributes& a, const Buffer& x, const Buffer& ids, const Buffer& wi_0) {
  if (const auto text = cuda::failure_text()) return to_error(text);
  return to_error(cuda::prepare(shape_of(a, x, ids, wi_0), a.virtual_ranks));
}

// What both directions decode alike.
void decode(const Attributes& a, const Buffer& x, const Buffer& expert_ids, const Buffer& expert_weights,
            const Buffer& wi_0, const Buffer& wi_1, const Buffer& wo, cuda::Call& c) {
  c.shape = shape_of(a, x, expert_ids, wi_0);
  c.save = static_cast<Save>(a.save);
  c.activation = static_cast<Activation>(a.activation);
  c.activation_limit = a.activation_limit;
  c.timeout_s = a.timeout_s;
  c.entry_timeout_s = a.entry_timeout_s;
  c.ranks_here = a.virtual_ranks;
  c.communication_ctas = larger(0, a.communication_sms);
  c.reserved_sms = larger(0, a.reserved_sms);
  c.x = data<bf16>(x);
  c.expert_ids = data<int32_t>(expert_ids);
  c.expert_weights = data<float>(expert_weights);
  c.wi_0 = data<bf16>(wi_0);
  c.wi_1 = data<bf16>(wi_1);
  c.wo = data<bf16>(wo);
}

template <class T>
T* data_or_null(const ffi::AnyBuffer& buffer) {
  return buffer.element_count() ? static_cast<T*>(buffer.untyped_data()) : nullptr;
}

ffi::Error initialize_forward(Buffer x, Buffer expert_ids, Buffer, Buffer wi_0, Buffer, Buffer, Buffer, Result, Result,
                              Result, Result, Result, Result, Result, Result, Attributes a) {
  return initialize(a, x, expert_ids, wi_0);
}

ffi::Error forward(cudaStream_t stream, Buffer x, Buffer expert_ids, Buffer expert_weights, Buffer wi_0, Buffer wi_1,
                   Buffer wo, Buffer, Result y, Result row_table, Result expert_rows, Result bad_tokens,
                   Result pre_activations, Result rows, Result hidden, Result workspace, Attributes a) {
  cuda::ForwardCall c{};
  decode(a, x, expert_ids, expert_weights, wi_0, wi_1, wo, c);
  c.out = data<bf16>(y);
  c.row_table = data<RowSource>(row_table);
  c.expert_rows = data<int32_t>(expert_rows);
  c.bad_tokens = data<int32_t>(bad_tokens);
  c.pre_activations = data_or_null<bf16>(*pre_activations);
  c.rows = data<bf16>(rows);
  c.hidden = data<bf16>(hidden);
  c.workspace = data<uint8_t>(workspace);
  return to_error(cuda::launch_forward(c, stream));
}

ffi::Error initialize_backward(Buffer x, Buffer expert_ids, Buffer, Buffer wi_0, Buffer, Buffer, Buffer, Buffer, Buffer,
                               Buffer, Buffer, Buffer, Result, Result, Result, Result, Result, Result, Result, Result,
                               Result, Result, Result, Result, Result, Result, Attributes a) {
  return initialize(a, x, expert_ids, wi_0);
}

ffi::Error backward(cudaStream_t stream, Buffer x, Buffer expert_ids, Buffer expert_weights, Buffer wi_0, Buffer wi_1,
                    Buffer wo, Buffer, Buffer dy, Buffer row_table, Buffer expert_rows, Buffer saved_pre_activations,
                    Buffer saved_rows, Result dx, Result router_grads, Result wi_0_grad, Result wi_1_grad,
                    Result wo_grad, Result rows, Result grads, Result pre_activations, Result hidden,
                    Result gate_up_grads, Result row_weights, Result router_parts, Result straddle, Result workspace,
                    Attributes a) {
  cuda::BackwardCall c{};
  decode(a, x, expert_ids, expert_weights, wi_0, wi_1, wo, c);
  c.dy = data<bf16>(dy);
  c.out = data<bf16>(dx);
  c.row_table = data<RowSource>(row_table);
  c.expert_rows = data<int32_t>(expert_rows);
  c.saved_pre_activations = data_or_null<bf16>(saved_pre_activations);
  c.saved_rows = data_or_null<bf16>(saved_rows);
  c.router_grads = data<float>(router_grads);
  c.wi_0_grad = wi_0_grad->untyped_data();
  c.wi_1_grad = wi_1_grad->untyped_data();
  c.wo_grad = wo_grad->untyped_data();
  c.grads_in_f32 = wi_0_grad->element_type() == ffi::F32;
  c.rows = data_or_null<bf16>(*rows);
  c.grads = data<bf16>(grads);
  c.pre_activations = data_or_null<bf16>(*pre_activations);
  c.hidden = data<bf16>(hidden);
  c.gate_up_grads = data<bf16>(gate_up_grads);
  c.row_weights = data<float>(row_weights);
  c.router_parts = data<float>(router_parts);
  c.straddle = data_or_null<float>(*straddle);
  c.workspace = data<uint8_t>(workspace);
  return to_error(cuda::launch_backward(c, stream));
}

auto bind_initialize() { return ffi::Ffi::Bind<ffi::ExecutionStage::kInitialize>(); }
auto bind_initialize_forward() { return with_buffers<7, 8>(bind_initialize()); }
auto bind_initialize_backward() { return with_buffers<12, 14>(bind_initialize()); }
auto bind_execute() { return ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>(); }
auto bind_forward() { return with_buffers<7, 8>(bind_execute()); }
auto bind_backward() { return with_buffers<12, 14>(bind_execute()); }

}  // namespace
}  // namespace mok::xla_ffi

XLA_FFI_DEFINE_HANDLER_SYMBOL(mok_cuda_forward_initialize, mok::xla_ffi::initialize_forward,
                              mok::xla_ffi::bind_initialize_forward());
XLA_FFI_DEFINE_HANDLER_SYMBOL(mok_cuda_forward, mok::xla_ffi::forward, mok::xla_ffi::bind_forward(),
                              {xla::ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(mok_cuda_backward_initialize, mok::xla_ffi::initialize_backward,
                              mok::xla_ffi::bind_initialize_backward());
XLA_FFI_DEFINE_HANDLER_SYMBOL(mok_cuda_backward, mok::xla_ffi::backward, mok::xla_ffi::bind_backward(),
                              {xla::ffi::Traits::kCmdBufferCompatible});
