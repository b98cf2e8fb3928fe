// A call on a GPU as the host has it, and the launches of each direction.
#pragma once

#include "cuda/params.h"
#include "cuda/runtime/error.h"
#include "cuda/runtime/peers.h"

namespace mok::cuda {

// What both directions have. Pointers are of `ranks_here` ranks, one after the other in every array.
struct Call {
  Direction direction;
  int64_t program;  // that the call is in: a hash of its name
  Shape shape;      // of each rank; shape.rank is that of the first
  Save save;
  Activation activation;
  float activation_limit;  // infinity: none
  double timeout_s, entry_timeout_s;
  const Peers* peers;  // null: all of the call's ranks are here
  int32_t ranks_here;  // 1, or shape.ranks: virtual ranks
  int32_t communication_ctas, reserved_sms;

  const bf16 *x, *dy;
  const int32_t *expert_ids, *where;
  const float* expert_weights;
  const bf16 *wi_0, *wi_1, *wo;
  bf16* out;
  RowSource* row_table;
  int32_t* expert_rows;
  bf16 *rows, *hidden;
  uint8_t* workspace;
};

struct ForwardCall : Call {
  ForwardCall() : Call{} { direction = Direction::forward; }

  int32_t* bad_tokens = nullptr;
  bf16* pre_activations = nullptr;  // or null
};

struct BackwardCall : Call {
  BackwardCall() : Call{} { direction = Direction::backward; }

  bf16 *pre_activations = nullptr, *saved_pre_activations = nullptr, *saved_rows = nullptr;  // or null
  bf16 *grads = nullptr, *gate_up_grads = nullptr;
  float *row_weights = nullptr, *router_parts = nullptr, *straddle = nullptr;
  float* router_grads = nullptr;
  void *wi_0_grad = nullptr, *wi_1_grad = nullptr, *wo_grad = nullptr;
  bool grads_in_f32 = false;
};

// Only enqueue: memory set, schedule kernel, layer kernel. With virtual ranks they copy from host memory too, which is
// not for graphs. `prepare` must have run for the shape.
Error launch_forward(const ForwardCall& call, cudaStream_t stream);
Error launch_backward(const BackwardCall& call, cudaStream_t stream);

}  // namespace mok::cuda
