// Arguments of the kernels: one rank's of a direction, or those of several virtual ranks that a test lays side by side
// on one device.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>

#include "cuda/workspace.h"
#include "moe/activation.h"
#include "moe/scratch.h"

namespace mok::cuda {

using bf16 = __nv_bfloat16;

// As kernels compute with it, in 32 bits.
inline constexpr int32_t kTileColumns = static_cast<int32_t>(mok::kTileColumns);

// What both directions have.
struct Rank {
  Shape shape;
  TileCounts tiles;
  Save save;
  Activation activation;
  float activation_limit;  // infinity: none
  int64_t timeout_ns, entry_timeout_ns;

  const bf16* x;                // [T, H]
  const bf16* dy;               // [T, H]; null in the forward
  const int32_t* expert_ids;    // [T, K]
  const float* expert_weights;  // [T, K]
  bf16* out;                    // [T, H], y or dx
  RowSource* row_table;         // [max_rows]; written by the forward, read by the backward
  int32_t* expert_rows;         // [E_local]; likewise
  bf16* rows;                   // [ring_rows, H], of x
  bf16* hidden;                 // [ring_rows, I]; in the backward times the router weight

  uint8_t* workspace;      // WorkspaceLayout
  uint8_t* const* arenas;  // [ranks], DeviceArena of each
  Failure* host_failure;   // mapped host memory

  __device__ WorkspaceHeader& header() const { return *reinterpret_cast<WorkspaceHeader*>(workspace); }
  __device__ ArenaHeader& arena_header(int64_t rank) const { return *reinterpret_cast<ArenaHeader*>(arenas[rank]); }
  template <class T>
  __device__ T* in_workspace(int64_t offset) const {
    return reinterpret_cast<T*>(workspace + offset);
  }
  template <class T>
  __device__ T* in_arena(int64_t rank, int64_t offset) const {
    return reinterpret_cast<T*>(arenas[rank] + offset);
  }
};

// Tensor maps. Names tell the boxes: _128 are 128 rows of 64 K; _64 are 64 rows of 128 bytes, read as a
// transposed operand or stored to. The swizzle is as wide as the box.
// Gradients of gate and up side by side are [ring_rows, 2, I], so that no box crosses from one into the other.
struct ForwardRank : Rank {
  static constexpr Direction kDirection = Direction::forward;
  CUtensorMap rows_128, hidden_128;     // [ring_rows, H], [ring_rows, I]
  CUtensorMap wi_0_64, wi_1_64, wo_64;  // [E_local, H, I] twice, [E_local, I, H]
  CUtensorMap hidden_64;
  int32_t* bad_tokens;    // scalar
  bf16* pre_activations;  // of macrobatch 0, in the order of registers (see sm90/pre_activations.cuh); null: not wanted
};

struct BackwardRank : Rank {
  static constexpr Direction kDirection = Direction::backward;
  CUtensorMap rows_128, wi_0_64, wi_1_64;     // replay, as in the forward
  CUtensorMap grads_128, wo_128;              // hidden_grad: [ring_rows, H]; [E_local, I, H]
  CUtensorMap gate_up_grads_128, hidden_128;  // its results; row_grad reads the former
  CUtensorMap wi_0_128, wi_1_128;             // row_grad
  CUtensorMap rows_64, saved_rows_64, grads_64, gate_up_grads_64, hidden_64;  // weight_grad
  CUtensorMap wi_0_grad_64, wi_1_grad_64, wo_grad_64;                         // its results
  bf16 *pre_activations, *saved_pre_activations;                              // replayed; a residual of macrobatch 0
  bool saved_rows;                                                            // macrobatch 0's rows are a residual
  float* row_weights;                                                         // [ring_rows]
  bf16* grads;                                                                // [ring_rows, H], of dy
  float* router_parts;                                                        // [ring_rows, hidden_grad tiles]
  float* straddle;      // [weight_grad tiles, 128, 256], accumulators in the order of registers
  float* router_grads;  // [T, K]
  void *wi_0_grad, *wi_1_grad, *wo_grad;
  bool grads_in_f32;
};

template <class R>
struct Launch {
  R one;
  const R* many;  // device memory; null: `one` is all
  int32_t ranks_here;
  int32_t communication_ctas;  // of each rank; 0: a communication warp in every CTA
  int32_t schedule_chunks;     // of each rank: most chunks of a phase of the schedule kernel

  __device__ const R& rank(int32_t i) const { return many ? many[i] : one; }
};

}  // namespace mok::cuda
