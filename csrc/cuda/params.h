// Arguments of the kernels: one rank's of a direction, or those of several virtual ranks that a test lays side by side
// on one device. The schedule kernel takes them as they are here; an architecture adds to them what its kernel wants
// besides (see KernelRank).
#pragma once

#include <cuda_bf16.h>

#include <concepts>

#include "cuda/workspace.h"
#include "moe/activation.h"
#include "moe/scratch.h"

namespace mok::cuda {

using bf16 = __nv_bfloat16;

// What both directions have.
struct Rank {
  Shape shape;
  TileCounts tiles;
  Save save;
  Activation activation;
  float activation_limit;  // infinity: none
  int64_t timeout_ns, entry_timeout_ns;

  const bf16* x;                 // [T, H]
  const bf16* dy;                // [T, H]; null in the forward
  const int32_t* expert_ids;     // [T, K]
  const float* expert_weights;   // [T, K]
  const bf16 *wi_0, *wi_1, *wo;  // [E_local, H, I] twice, [E_local, I, H]
  bf16* out;                     // [T, H], y or dx
  RowSource* row_table;          // [max_rows]; written by the forward, read by the backward
  int32_t* expert_rows;          // [E_local]; likewise
  bf16* rows;                    // [ring_rows, H], of x
  bf16* hidden;                  // [ring_rows, I]; in the backward times the router weight

  uint8_t* workspace;            // WorkspaceLayout
  uint64_t hash;                 // of what the call is, alike on all ranks
  const int32_t* where;          // the rank as the mesh has it, which must be the communicator's; null: no peers
  Meeting* meetings[kMaxRanks];  // of each rank
  uint8_t* arenas[kMaxRanks];    // of each rank, where its DeviceRows begin; SharedArenaLayout has its ids before them
  int64_t arena_ids;             // bytes of each of an arena's two buffers of ids
  DeviceState* device;
  Failure* host_failure;  // the device's, in mapped host memory

  __device__ WorkspaceHeader& header() const { return *reinterpret_cast<WorkspaceHeader*>(workspace); }
  __device__ Meeting& meeting() const { return *meetings[shape.rank]; }
  __device__ int64_t call() const { return meeting().progress.call + 1; }  // its number
  // Those of all ranks, [ranks, T * K], in the arena of one.
  __device__ int32_t* ids_in_arena(int64_t rank, int64_t call) const {
    return reinterpret_cast<int32_t*>(arenas[rank] - (2 - parity_of(call)) * arena_ids);
  }
  template <class T>
  __device__ T* in_workspace(int64_t offset) const {
    return reinterpret_cast<T*>(workspace + offset);
  }
  template <class T>
  __device__ T* in_arena(int64_t rank, int64_t offset) const {
    return reinterpret_cast<T*>(arenas[rank] + offset);
  }
};

struct ForwardRank : Rank {
  static constexpr Direction kDirection = Direction::forward;
  int32_t* bad_tokens;    // scalar
  bf16* pre_activations;  // of macrobatch 0, in the architecture's order; null: not wanted
};

// Gradients of gate and up lie side by side, so that no tile crosses from one into the other.
struct BackwardRank : Rank {
  static constexpr Direction kDirection = Direction::backward;
  bf16 *pre_activations, *saved_pre_activations;  // replayed; a residual of macrobatch 0
  const bf16* saved_rows;                         // macrobatch 0's, where they are a residual, else null
  float* row_weights;                             // [ring_rows]
  bf16* grads;                                    // [ring_rows, H], of dy
  bf16* gate_up_grads;                            // [ring_rows, 2, I]
  float* router_parts;                            // [ring_rows, hidden_grad tiles]
  float* straddle;      // of a tile 128 x 256 accumulators, [weight_grad tiles], in the architecture's order
  float* router_grads;  // [T, K]
  void *wi_0_grad, *wi_1_grad, *wo_grad;
  bool grads_in_f32;
};

// The arguments of an architecture's kernel, from which code that all architectures share learns what it must know of
// one: how wide its tiles are, and which fences it wants.
template <class R>
concept KernelRank = std::derived_from<R, Rank> && requires {
  // Columns of a tile that down and row_grad push.
  { R::kTileColumns } -> std::convertible_to<int32_t>;
  // By a thread that has acquired what others released: what it, or a copy that it issues, reads comes later.
  R::Fences::after_acquire();
  // By a thread that is about to release: what it, or a copy that it has waited for, has written comes earlier.
  R::Fences::before_release();
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
