// Gate and up tiles: [128 rows, 128 columns of gate | the same 128 of up] = rows @ (wi_0 | wi_1). A thread holds a gate
// column and its up column, so SwiGLU needs no interleaved weights. The forward's tile, and the backward's replay.
#pragma once

#include "cuda/sm90/megakernel.cuh"

namespace mok::cuda::sm90 {

// R has rows_128, wi_0_64, wi_1_64.
template <class R>
__device__ __forceinline__ void load_gate_up(const R& rank, Shared& s, const Task& t, int32_t step, Stages& stages) {
  uint8_t* stage = stages.acquire(s.tiles, kStageBytes);
  uint64_t* full = stages.full(s.tiles);
  uint8_t* right = stage + kLeftBytes;
  const int32_t k = step * kTileDepth, column = t.part * kGateUpColumns;
  tensor_load_2d(stage, &rank.rows_128, k, s.schedule.plan.ring_block(t.block) * static_cast<int32_t>(kRowBlock), full);
  for (int32_t i = 0; i < 2; ++i) {
    tensor_load_3d(right + i * kBoxBytes, &rank.wi_0_64, column + i * kBoxColumns, k, t.expert, full);
    tensor_load_3d(right + (i + 2) * kBoxBytes, &rank.wi_1_64, column + i * kBoxColumns, k, t.expert, full);
  }
  stages.advance();
}

// Rounded pre-activations of a tile, from the store warp's staging area to [ring_rows, 2 I].
__device__ __forceinline__ void store_pre_activations(const Rank& rank, const Plan& plan, const Task& t, int32_t group,
                                                      bf16* pre_activations, StoreSide& side) {
  const int64_t inner = rank.shape.intermediate, column = t.part * kGateUpColumns;
  const int64_t row = plan.ring_block(t.block) * kRowBlock + group * kGroupRows;
  const int64_t bytes = 2 * smaller<int64_t>(kGateUpColumns, inner - column);
  const int32_t count = plan.real_rows(t.block) - group * kGroupRows;
  bf16* to = pre_activations + row * 2 * inner + column;
  const uint8_t* staged = side.acquire();
  store_rows(staged, count, bytes, [&](int32_t i) { return to + i * 2 * inner; });
  store_rows(staged + kGateUpColumns * 2, count, bytes, [&](int32_t i) { return to + i * 2 * inner + inner; });
  side.release();
}

__device__ __forceinline__ float clamp_gate(float gate, float limit) { return gate > limit ? limit : gate; }
__device__ __forceinline__ float clamp_up(float up, float limit) {
  return up > limit ? limit : up < -limit ? -limit : up;
}
__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.f, 1.f + __expf(-x)); }

}  // namespace mok::cuda::sm90
