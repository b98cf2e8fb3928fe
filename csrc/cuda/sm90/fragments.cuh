// What a math thread holds of a tile, and what epilogues do with it: its accumulators as fragments of 8. Fragment i of
// thread t has columns 16 * i + 2 * (t % 4) and the next one, of a row and of the row 8 below it, and then the same 8
// columns to the right (see wgmma_64x256x16).
#pragma once

#include "cuda/sm90/tile.cuh"

namespace mok::cuda::sm90 {

inline constexpr int32_t kFragment = 8, kFragments = kAccumulators / kFragment;

// Calls visit(i, values) for each fragment.
template <class Visit>
__device__ __forceinline__ void for_each_fragment(const Accumulators& acc, const Visit& visit) {
#pragma unroll
  for (int32_t i = 0; i < kFragments; ++i) visit(i, acc + kFragment * i);
}

// Calls visit(i, gate, up) for each pair of fragments of a gate_up tile that hold the same columns.
template <class Visit>
__device__ __forceinline__ void for_each_gate_and_up(const Accumulators& acc, const Visit& visit) {
#pragma unroll
  for (int32_t i = 0; i < kFragments / 2; ++i) visit(i, acc + kFragment * i, acc + kFragment * i + kAccumulators / 2);
}

// Unrounded, to memory and back: 16 bytes a thread, those of the math warps side by side. `tile` has room for all.
__device__ __forceinline__ void save_fragments(const Accumulators& acc, float* tile) {
  float4* to = reinterpret_cast<float4*>(tile) + thread_index();
#pragma unroll
  for (int32_t i = 0; i < kAccumulators / 4; ++i) {
    to[i * kMathWarps * 32] = make_float4(acc[4 * i], acc[4 * i + 1], acc[4 * i + 2], acc[4 * i + 3]);
  }
}
__device__ __forceinline__ void load_fragments(Accumulators& acc, const float* tile) {
  const float4* from = reinterpret_cast<const float4*>(tile) + thread_index();
#pragma unroll
  for (int32_t i = 0; i < kAccumulators / 4; ++i) {
    const float4 v = __ldcg(from + i * kMathWarps * 32);
    acc[4 * i] = v.x;
    acc[4 * i + 1] = v.y;
    acc[4 * i + 2] = v.z;
    acc[4 * i + 3] = v.w;
  }
}
__device__ __forceinline__ void clear_fragments(Accumulators& acc) {
#pragma unroll
  for (float& v : acc) v = 0.f;
}

// A fragment as pairs of bf16, in its order.
__device__ __forceinline__ uint4 rounded(const float* fragment) {
  return {pack_bf16(fragment[0], fragment[1]), pack_bf16(fragment[2], fragment[3]), pack_bf16(fragment[4], fragment[5]),
          pack_bf16(fragment[6], fragment[7])};
}

}  // namespace mok::cuda::sm90
