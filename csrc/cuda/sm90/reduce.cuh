// The final reduce of both directions: out[t] = sum over k, ascending, of (weight *) slot in f32, rounded once. Empty
// slots are skipped; rows of bad tokens are NaN. Slots pass through the ring of stages, which keeps enough bytes on
// their way for the memory's full rate: a stage holds some columns of all of a token's slots.
#pragma once

#include "cuda/params.h"
#include "cuda/sm90/tile.cuh"

namespace mok::cuda::sm90 {

constexpr float kNaN = __builtin_nanf("");

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

// How the slots of a block of tokens are cut into stages. A stage holds at least 256 columns of up to 48 slots:
// kMaxTopK.
struct SlotPieces {
  int32_t h, top_k, tokens, width, across;
  int64_t first_token;

  __device__ __forceinline__ SlotPieces(const Shape& s, int32_t block) {
    h = static_cast<int32_t>(s.hidden);
    top_k = static_cast<int32_t>(s.top_k);
    first_token = block * kReduceTokens;
    tokens = static_cast<int32_t>(smaller(kReduceTokens, s.tokens - first_token));
    width = kStageBytes / 2 / top_k / 256 * 256;
    across = (h + width - 1) / width;
  }
};

// An even number, like all tasks'; the last one may be empty.
__device__ __forceinline__ int32_t reduce_stages(const Rank& rank, int32_t block) {
  const SlotPieces p(rank.shape, block);
  return (p.tokens * p.across + 1) / 2 * 2;
}

__device__ __forceinline__ void load_slots(const Rank& rank, TileMemory& m, int32_t block, Stages& stages) {
  const SlotPieces p(rank.shape, block);
  const DeviceArena arena(rank.shape);
  const bf16* slots =
      rank.in_arena<bf16>(rank.shape.rank, arena.at(arena.layout.slots)) + p.first_token * p.top_k * p.h;
  const int32_t count = p.tokens * p.across;
  for (int32_t i = 0; i < count; ++i) {
    const int32_t token = i / p.across, column = i % p.across * p.width, columns = smaller(p.width, p.h - column);
    uint8_t* stage = stages.acquire(m, p.top_k * columns * 2);
    for (int32_t k = 0; k < p.top_k; ++k) {
      const bf16* from = slots + (int64_t{token} * p.top_k + k) * p.h + column;
      bulk_load(stage + k * p.width * 2, from, columns * 2, stages.full(m));
    }
    stages.advance();
  }
  if (count % 2 == 0) return;
  stages.acquire(m, 0);
  stages.advance();
}

// By all math warps: each thread has 8 columns of a stage, or several times 8. In the backward slots carry the weight
// already.
template <bool kWeighted>
__device__ __forceinline__ void reduce_tokens(const Rank& rank, int64_t call, int32_t block, TileMemory& m,
                                              Stages& stages) {
  const SlotPieces p(rank.shape, block);
  const int32_t* ids = rank.in_arena<int32_t>(rank.shape.rank, DeviceArena(rank.shape).expert_ids(call));
  const uint8_t* bad = rank.in_workspace<uint8_t>(WorkspaceLayout(rank.shape).bad);
  const int32_t count = p.tokens * p.across;
  for (int32_t i = 0; i < (count + 1) / 2 * 2; ++i) {
    const int64_t token = p.first_token + i / p.across;
    const int32_t first = i % p.across * p.width, columns = i < count ? smaller(p.width, p.h - first) : 0;
    stages.wait_full(m);
    const uint8_t* stage = stages.memory(m);
    for (int32_t own = thread_index() * 8; own < columns; own += 256 * 8) {
      Float8 sum;
#pragma unroll
      for (float& v : sum.v) v = bad[token] ? kNaN : 0.f;
      for (int32_t k = 0; k < p.top_k; ++k) {
        const int64_t slot = token * p.top_k + k;
        if (ids[slot] < 0) continue;
        const uint4 packed = *reinterpret_cast<const uint4*>(stage + (k * p.width + own) * 2);
        sum.add_scaled(packed, kWeighted ? rank.expert_weights[slot] : 1.f);
      }
      *reinterpret_cast<uint4*>(rank.out + token * p.h + first + own) = sum.rounded();
    }
    __syncwarp();
    if (lane_index() == 0) mbarrier_arrive(stages.empty(m));
    stages.advance();
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

}  // namespace mok::cuda::sm90
