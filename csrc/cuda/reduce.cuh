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
// time and has several slots of a token in flight. In the backward slots carry the weight already.
template <bool kWeighted>
__device__ __forceinline__ void reduce_tokens(const Rank& rank, int64_t call, int32_t block, int32_t warp, int32_t warps) {
  constexpr int32_t kInFlight = 8;
  const Shape& s = rank.shape;
  const DeviceArena arena(s);
  const int64_t h = s.hidden, end = smaller((block + 1) * kReduceTokens, s.tokens);
  const int32_t k_count = static_cast<int32_t>(s.top_k);
  const bf16* slots = rank.in_arena<bf16>(s.rank, arena.at(arena.layout.slots));
  const int32_t* ids = rank.in_arena<int32_t>(s.rank, arena.expert_ids(call));
  const uint8_t* bad = rank.in_workspace<uint8_t>(WorkspaceLayout(s).bad);
  for (int64_t token = block * kReduceTokens + warp; token < end; token += warps) {
    const bf16* from = slots + token * k_count * h;
    const float start = bad[token] ? kNaN : 0.f;
    for (int64_t column = lane_index() * 8; column < h; column += 32 * 8) {
      Float8 sum;
#pragma unroll
      for (float& v : sum.v) v = start;
      for (int32_t k = 0; k < k_count; k += kInFlight) {
        uint4 packed[kInFlight];
        float weight[kInFlight];
        bool used[kInFlight];
#pragma unroll
        for (int32_t i = 0; i < kInFlight; ++i) {
          const int64_t slot = token * k_count + k + i;
          used[i] = k + i < k_count && ids[slot] >= 0;
          if (used[i]) {
            packed[i] = load_uncached(from + (k + i) * h + column);
            weight[i] = kWeighted ? rank.expert_weights[slot] : 1.f;
          }
        }
#pragma unroll
        for (int32_t i = 0; i < kInFlight; ++i) {
          if (used[i]) sum.add_scaled(packed[i], weight[i]);
        }
      }
      *reinterpret_cast<uint4*>(rank.out + token * h + column) = sum.rounded();
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
