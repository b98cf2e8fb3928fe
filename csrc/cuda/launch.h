// The host's side of a call on a GPU: memory that outlives calls, tensor maps, and the launches of each direction.
#pragma once

#include <cuda_runtime.h>

#include <optional>
#include <string>

#include "cuda/params.h"

namespace mok::cuda {

// What both directions have. Pointers are of `ranks_here` ranks, one after the other in every array.
struct Call {
  Shape shape;  // of each rank; shape.rank is that of the first
  Save save;
  Activation activation;
  float activation_limit;  // infinity: none
  double timeout_s, entry_timeout_s;
  int32_t ranks_here;  // 1, or shape.ranks: virtual ranks
  int32_t communication_ctas, reserved_sms;

  const bf16 *x, *dy;
  const int32_t* expert_ids;
  const float* expert_weights;
  const bf16 *wi_0, *wi_1, *wo;
  bf16* out;
  RowSource* row_table;
  int32_t* expert_rows;
  bf16 *rows, *hidden;
  uint8_t* workspace;
};

struct ForwardCall : Call {
  int32_t* bad_tokens;
  bf16* pre_activations;  // or null
};

struct BackwardCall : Call {
  bf16 *pre_activations, *saved_pre_activations, *saved_rows;  // or null
  bf16 *grads, *gate_up_grads;
  float *row_weights, *router_parts, *straddle;
  float* router_grads;
  void *wi_0_grad, *wi_1_grad, *wo_grad;
  bool grads_in_f32;
};

// Makes what launches need on the current device: arenas for this shape, and every kernel loaded. May allocate and
// synchronise; must have run once before a launch. All return what went wrong, or nothing.
std::optional<std::string> prepare(const Shape& shape, int32_t ranks_here);

// Only enqueue: memory set, schedule kernel, layer kernel. With virtual ranks they copy from host memory too, which is
// not for graphs.
std::optional<std::string> launch_forward(const ForwardCall& call, cudaStream_t stream);
std::optional<std::string> launch_backward(const BackwardCall& call, cudaStream_t stream);

// Calls of one rank alone that the current device has completed, and the clock cycles of all CTAs of their layer
// kernels. Waits for the device, so not while a graph is captured; begins anew when a bigger arena is made.
struct Cycles {
  int64_t calls, cycles;
};
Cycles cycles();

// What the device has reported of an earlier call, if anything. Reads host memory only.
std::optional<std::string> failure_text();

}  // namespace mok::cuda
