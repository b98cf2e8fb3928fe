// Pre-activations as a gate_up tile leaves them and a hidden_grad tile finds them: in the order of registers,
// [ring block][tile][2 chunks of 64 columns][gate, up][8 warps][4 vectors][32 lanes][8 bf16]. Both tiles hold the same
// elements in the same threads. A chunk is contiguous, and the 2,048 bytes of a warp's gate (or up) are as many as its
// rows take in a box of 64 columns, so that results can replace them in place.
#pragma once

#include "cuda/sm90/tile.cuh"

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
#pragma unroll
  for (int32_t chunk = 0; chunk < kTileChunks; ++chunk) {
#pragma unroll
    for (int32_t half = 0; half < 2; ++half) {
#pragma unroll
      for (int32_t v = 0; v < kChunkVectors; ++v) {
        const float* a = acc + half * kAccumulators / 2 + (chunk * kChunkVectors + v) * 8;
        const uint4 packed = {pack_bf16(a[0], a[1]), pack_bf16(a[2], a[3]), pack_bf16(a[4], a[5]),
                              pack_bf16(a[6], a[7])};
        *reinterpret_cast<uint4*>(to + chunk * kChunkElements + half * kChunkElements / 2 + v * 256) = packed;
      }
    }
  }
}

}  // namespace mok::cuda::sm90
