// Arguments of the kernels: one Rank a rank that runs on this device. There is one, except where a test lays several
// virtual ranks side by side.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>

#include "cuda/workspace.h"

namespace mok::cuda {

using bf16 = __nv_bfloat16;

struct Rank {
  // Tensor maps, all with the 128-byte swizzle.
  CUtensorMap rows_map, hidden_map;        // [ring_rows, H], [ring_rows, I]; boxes of 128 rows x 64 columns
  CUtensorMap wi_0_map, wi_1_map, wo_map;  // [E_local, H, I] twice, [E_local, I, H]; boxes of 64 rows x 64 columns

  Shape shape;
  TileCounts tiles;
  Save save;
  float activation_limit;  // infinity: none
  int64_t timeout_ns, entry_timeout_ns;

  const bf16* x;                // [T, H]
  const int32_t* expert_ids;    // [T, K]
  const float* expert_weights;  // [T, K]

  bf16* y;                // [T, H]
  RowSource* row_table;   // [max_rows]
  int32_t* expert_rows;   // [E_local]
  int32_t* bad_tokens;    // scalar
  bf16* pre_activations;  // [ring_rows, 2 I], gate then up, of macrobatch 0; null: not wanted
  bf16* rows;             // [ring_rows, H]
  bf16* hidden;           // [ring_rows, I]

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

struct Launch {
  Rank one;
  const Rank* many;  // device memory; null: `one` is all
  int32_t ranks_here;
  int32_t communication_ctas;  // of each rank; 0: a communication warp in every CTA

  __device__ const Rank& rank(int32_t i) const { return many ? many[i] : one; }
};

}  // namespace mok::cuda
