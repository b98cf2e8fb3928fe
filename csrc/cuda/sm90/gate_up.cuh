// Gate and up tiles: [128 rows, 128 columns of gate | the same 128 of up] = rows @ (wi_0 | wi_1). A thread holds a gate
// column and its up column, so SwiGLU needs no interleaved weights. The forward's tile, and the backward's replay.
//
// Pre-activations are kept in the order of registers: [ring block][tile][2 chunks of 64 columns][gate, up][8 warps]
// [4 vectors][32 lanes][8 bf16]. The backward's hidden_grad tile holds the same elements in the same threads. A chunk
// is contiguous, and the 2,048 bytes of a warp's gate (or up) are as many as its rows take in a box of 64 columns, so
// that results can replace them in place.
#pragma once

#include "cuda/sm90/math.cuh"

namespace mok::cuda::sm90 {

inline constexpr int32_t kChunkColumns = 64, kChunkVectors = kChunkColumns / 16;
inline constexpr int32_t kChunkElements = kBlockRows * kChunkColumns * 2;  // gate and up
inline constexpr int32_t kTileChunks = kGateUpColumns / kChunkColumns;

inline constexpr float kInfinity = __builtin_huge_valf();

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

// R has rows_128, wi_0_64, wi_1_64.
template <class R>
__device__ __forceinline__ void load_gate_up(const R& rank, Shared& s, const QueuedTask& t, Loader& loader) {
  const int32_t steps = t.steps, row = t.ring_row, column = t.part * kGateUpColumns, expert = t.expert;
  for (int32_t step = 0; step < steps; ++step) {
    const int32_t k = step * kStepDepth;
    loader.step(
        s.tiles, [&](uint8_t* to, uint64_t* full) { tensor_load_2d(to, &rank.rows_128, k, row, full); },
        [&](int32_t half, uint8_t* to, uint64_t* full, bool both) {
          const CUtensorMap* weights = half ? &rank.wi_1_64 : &rank.wi_0_64;
          load_3d(to, weights, column, k, expert, full, both);
          load_3d(to + kBoxBytes, weights, column + kBoxColumns, k, expert, full, both);
        });
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
      for (int32_t v = 0; v < kChunkVectors; ++v) {
        const float* a = acc + half * kAccumulators / 2 + (chunk * kChunkVectors + v) * 8;
        const uint4 packed = {pack_bf16(a[0], a[1]), pack_bf16(a[2], a[3]), pack_bf16(a[4], a[5]),
                              pack_bf16(a[6], a[7])};
        *reinterpret_cast<uint4*>(to + chunk * kChunkElements + half * kChunkElements / 2 + v * 256) = packed;
      }
    }
  }
}

// 1 / (1 + exp(-x)); exp and the reciprocal are the hardware's, good to about 2 units in the last place.
__device__ __forceinline__ float sigmoid(float x) {
  float e, r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(__fmul_rn(x, -1.4426950408889634f)));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(__fadd_rn(1.f, e)));
  return r;
}

// The clamps of an activation limit; without one they cost nothing.
template <bool kLimited>
__device__ __forceinline__ float clamp_gate(float gate, float limit) {
  return kLimited && gate > limit ? limit : gate;
}
template <bool kLimited>
__device__ __forceinline__ float clamp_up(float up, float limit) {
  if (!kLimited) return up;
  return up > limit ? limit : up < -limit ? -limit : up;
}

}  // namespace mok::cuda::sm90
