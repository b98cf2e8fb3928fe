// Gate and up tiles: [128 rows, 128 columns of gate | the same 128 of up] = rows @ (wi_0 | wi_1). A thread holds a gate
// column and its up column, so SwiGLU needs no interleaved weights. The forward's tile, and the backward's replay.
//
// Pre-activations are kept in the order of registers: [ring block][tile][4 chunks of 32 columns][gate, up][8 warps]
// [2 vectors][32 lanes][8 bf16]. The backward's hidden_grad tile holds the same elements in the same threads. A chunk is
// contiguous, and the 1,024 bytes of a warp's gate (or up) are as many as its rows take in a stage, so that results can
// replace them in place.
#pragma once

#include "cuda/sm90/megakernel.cuh"

namespace mok::cuda::sm90 {

inline constexpr int32_t kChunkColumns = 32;
inline constexpr int32_t kChunkElements = static_cast<int32_t>(kRowBlock) * kChunkColumns * 2;  // gate and up
inline constexpr int32_t kTileChunks = kGateUpColumns / kChunkColumns;

// The first chunk of a tile.
__device__ __forceinline__ bf16* pre_activation_tile(bf16* pre_activations, const Rank& rank, const Plan& plan,
                                                     int32_t block, int32_t tile) {
  const int64_t index = int64_t{plan.ring_block(block)} * rank.tiles.gate_up + tile;
  return pre_activations + index * kTileChunks * kChunkElements;
}

// This thread's first vector of a warp's gate.
__device__ __forceinline__ int32_t fragment_offset() { return thread_index() / 32 * 512 + lane_index() * 8; }

// R has rows_128, wi_0_32, wi_1_32.
template <class R, class Between>
__device__ __forceinline__ void load_gate_up(const R& rank, Shared& s, const Task& t, Stages& stages,
                                             const Between& between) {
  const int32_t steps = static_cast<int32_t>(ceil_div(rank.shape.hidden, kTileDepth));
  const int32_t row = s.schedule.plan.ring_block(t.block) * static_cast<int32_t>(kRowBlock);
  const int32_t column = t.part * kGateUpColumns, expert = t.expert;
  for (int32_t step = 0; step < steps; ++step) {
    between(step);
    const int32_t k = step * kTileDepth;
    uint8_t* stage = stages.acquire(s.tiles, kStageBytes);
    uint64_t* full = stages.full(s.tiles);
    uint8_t* right = stage + kLeftBytes;
    tensor_load_2d(stage, &rank.rows_128, k, row, full);
#pragma unroll
    for (int32_t i = 0; i < 2; ++i) {
      tensor_load_3d(right + i * kBoxBytes, &rank.wi_0_32, column + i * kBoxColumns, k, expert, full);
      tensor_load_3d(right + (i + 2) * kBoxBytes, &rank.wi_1_32, column + i * kBoxColumns, k, expert, full);
    }
    stages.advance();
  }
}

// Rounded pre-activations of the tile, straight from registers: 512 bytes a warp and instruction.
__device__ __forceinline__ void store_pre_activations(const Accumulators& acc, bf16* tile) {
  bf16* to = tile + fragment_offset();
#pragma unroll
  for (int32_t chunk = 0; chunk < kTileChunks; ++chunk) {
#pragma unroll
    for (int32_t half = 0; half < 2; ++half) {
#pragma unroll
      for (int32_t v = 0; v < 2; ++v) {
        const float* a = acc + half * kAccumulators / 2 + chunk * 16 + v * 8;
        const uint4 packed = {pack_bf16(a[0], a[1]), pack_bf16(a[2], a[3]), pack_bf16(a[4], a[5]), pack_bf16(a[6], a[7])};
        *reinterpret_cast<uint4*>(to + chunk * kChunkElements + half * kChunkElements / 2 + v * 256) = packed;
      }
    }
  }
}

__device__ __forceinline__ float clamp_gate(float gate, float limit) { return gate > limit ? limit : gate; }
__device__ __forceinline__ float clamp_up(float up, float limit) {
  return up > limit ? limit : up < -limit ? -limit : up;
}
__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.f, 1.f + __expf(-x)); }

}  // namespace mok::cuda::sm90
