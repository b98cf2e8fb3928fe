// A rank's arguments as Hopper's kernels take them: with tensor maps of what the copy engine loads and stores.
#pragma once

#include <cuda.h>

#include "cuda/params.h"

namespace mok::cuda::sm90 {

inline constexpr int32_t kPair = 2;  // CTAs of a cluster
inline constexpr int32_t kTileColumns = 256;
static_assert(kTileColumns == mok::kTileColumns);

struct Fences;  // fences.cuh

// Names of maps tell the boxes: _128 are 128 rows of 64 K; _64 are 64 rows of 128 bytes, read as a transposed operand
// or stored to. The swizzle is as wide as the box. Maps of memory that a call has none of are never used.
struct ForwardRank : cuda::ForwardRank {
  using Fences = sm90::Fences;
  static constexpr int32_t kTileColumns = sm90::kTileColumns;
  CUtensorMap rows_128, hidden_128;     // [ring_rows, H], [ring_rows, I]
  CUtensorMap wi_0_64, wi_1_64, wo_64;  // [E_local, H, I] twice, [E_local, I, H]
  CUtensorMap hidden_64;
};

struct BackwardRank : cuda::BackwardRank {
  using Fences = sm90::Fences;
  static constexpr int32_t kTileColumns = sm90::kTileColumns;
  CUtensorMap rows_128, wi_0_64, wi_1_64;     // replay, as in the forward
  CUtensorMap grads_128, wo_128;              // hidden_grad: [ring_rows, H]; [E_local, I, H]
  CUtensorMap gate_up_grads_128, hidden_128;  // its results; row_grad reads the former
  CUtensorMap wi_0_128, wi_1_128;             // row_grad
  CUtensorMap rows_64, saved_rows_64, grads_64, gate_up_grads_64, hidden_64;  // weight_grad
  CUtensorMap wi_0_grad_64, wi_1_grad_64, wo_grad_64;                         // its results
};

}  // namespace mok::cuda::sm90
