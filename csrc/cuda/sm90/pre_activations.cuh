// Pre-activations as a gate_up tile leaves them and a hidden_grad tile finds them: in the order of registers,
// [ring block][tile][2 chunks of 64 columns][gate, up][8 warps][4 vectors][32 lanes][8 bf16]. Both tiles hold the same
// elements in the same threads. A chunk is contiguous, and the 2,048 bytes of a warp's gate (or up) are as many as its
// rows take in a box of 64 columns, so that results can replace them in place.
#pragma once

#include "cuda/sm90/fragments.cuh"

namespace mok::cuda::sm90 {

inline constexpr int32_t kChunkColumns = 64, kChunkVectors = kChunkColumns / 16;
inline constexpr int32_t kChunkElements = kBlockRows * kChunkColumns * 2;  // gate and up
inline constexpr int32_t kTileChunks = kGateUpColumns / kChunkColumns;

// The first chunk of a tile.
__device__ __forceinline__ bf16* pre_activation_tile(bf16* pre_activations, const Rank& rank, int32_t ring_row,
                                                     int32_t tile) {
  const int64_t index = int64_t{ring_row / kBlockRows} * rank.tiles.gate_up + tile;
  return pre_activations + index * kTileChunks * kChunkElements;
}

// This thread's first vector of a warp's gate.
__device__ __forceinline__ int32_t fragment_offset() {
  return thread_index() / 32 * kChunkVectors * 256 + lane_index() * 8;
}

// Rounded pre-activations of the tile, straight from registers: 512 bytes a warp and instruction.
__device__ __forceinline__ void store_pre_activations(const Accumulators& acc, bf16* tile) {
  bf16* to = tile + fragment_offset();
  for_each_gate_and_up(acc, [&](int32_t i, const float* gate, const float* up) {
    bf16* place = to + i / kChunkVectors * kChunkElements + i % kChunkVectors * 256;
    *reinterpret_cast<uint4*>(place) = rounded(gate);
    *reinterpret_cast<uint4*>(place + kChunkElements / 2) = rounded(up);
  });
}

}  // namespace mok::cuda::sm90
