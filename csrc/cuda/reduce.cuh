// The final reduce of both directions: out[t] = sum over k, ascending, of (weight *) slot in f32, rounded once. Empty
// slots are skipped; rows of bad tokens are NaN.
#pragma once

#include "cuda/params.h"
#include "cuda/ptx.cuh"

namespace mok::cuda {

struct Float8 {
  float v[8];

  __device__ __forceinline__ void add_scaled(const uint4& packed, float scale) {
    const __nv_bfloat162* pairs = reinterpret_cast<const __nv_bfloat162*>(&packed);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 f = __bfloat1622float2(pairs[i]);
      v[2 * i] = __fmaf_rn(scale, f.x, v[2 * i]);
      v[2 * i + 1] = __fmaf_rn(scale, f.y, v[2 * i + 1]);
    }
  }
  __device__ __forceinline__ uint4 rounded() const {
    uint4 packed;
    __nv_bfloat162* pairs = reinterpret_cast<__nv_bfloat162*>(&packed);
#pragma unroll
    for (int i = 0; i < 4; ++i) pairs[i] = __floats2bfloat162_rn(v[2 * i], v[2 * i + 1]);
    return packed;
  }
};

constexpr float kNaN = __builtin_nanf("");

// Tokens [block * kReduceTokens, ...), by `warps` warps of which this is number `warp`. Each lane owns 8 columns at a
// time and has kInFlight slots in flight. In the backward slots carry the weight already.
template <bool kWeighted, int32_t kInFlight>
__device__ __forceinline__ void reduce_tokens(const Rank& rank, int64_t call, int32_t block, int32_t warp,
                                              int32_t warps) {
  constexpr int32_t kStride = 32 * 8;
  const Shape& s = rank.shape;
  const DeviceArena arena(s);
  const int32_t h = static_cast<int32_t>(s.hidden), k_count = static_cast<int32_t>(s.top_k);
  const int64_t end = smaller((block + 1) * kReduceTokens, s.tokens);
  const bf16* slots = rank.in_arena<bf16>(s.rank, arena.at(arena.layout.slots));
  const int32_t* ids = rank.in_arena<int32_t>(s.rank, arena.expert_ids(call));
  const uint8_t* bad = rank.in_workspace<uint8_t>(WorkspaceLayout(s).bad);
  for (int64_t token = block * kReduceTokens + warp; token < end; token += warps) {
    const float start = bad[token] ? kNaN : 0.f;
    for (int32_t column = lane_index() * 8; column < round_up(h, kStride); column += kStride) {
      Float8 sum;
#pragma unroll
      for (float& v : sum.v) v = start;
      for (int32_t first = 0; first < k_count; first += kInFlight) {
        // Lane k looks up slot first + k, for all.
        const int64_t slot = token * k_count + first + lane_index();
        const bool has = first + lane_index() < k_count && lane_index() < kInFlight;
        const uint32_t used = __ballot_sync(0xffffffff, has && ids[has ? slot : 0] >= 0);
        const float my_weight = kWeighted && has ? rank.expert_weights[slot] : 1.f;
        const bf16* from = slots + (token * k_count + first) * h + column;
        uint4 packed[kInFlight];
#pragma unroll
        for (int32_t i = 0; i < kInFlight; ++i) {
          if (used >> i & 1 && column < h) packed[i] = load_uncached(from + i * h);
        }
#pragma unroll
        for (int32_t i = 0; i < kInFlight; ++i) {
          const float weight = __shfl_sync(0xffffffff, my_weight, i);
          if (used >> i & 1) sum.add_scaled(packed[i], weight);
        }
      }
      if (column < h) *reinterpret_cast<uint4*>(rank.out + token * h + column) = sum.rounded();
    }
  }
}

// Router gradients of the same tokens: as they came; of empty slots 0, of bad tokens NaN.
__device__ __forceinline__ void collect_router_grads(const BackwardRank& rank, int64_t call, int32_t block,
                                                     int32_t thread, int32_t threads) {
  const Shape& s = rank.shape;
  const DeviceArena arena(s);
  const float* grads = rank.in_arena<float>(s.rank, arena.at(arena.layout.weight_grads));
  const int32_t* ids = rank.in_arena<int32_t>(s.rank, arena.expert_ids(call));
  const uint8_t* bad = rank.in_workspace<uint8_t>(WorkspaceLayout(s).bad);
  const int64_t end = smaller((block + 1) * kReduceTokens, s.tokens) * s.top_k;
  for (int64_t slot = block * kReduceTokens * s.top_k + thread; slot < end; slot += threads) {
    rank.expert_weight_grads[slot] = bad[slot / s.top_k] ? kNaN : ids[slot] < 0 ? 0.f : __ldcg(grads + slot);
  }
}

}  // namespace mok::cuda
