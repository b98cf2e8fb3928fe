// The final reduce of both directions: out[t] = sum over k, ascending, of (weight *) slot in f32, rounded once. Empty
// slots are skipped; rows of bad tokens are NaN. Slots pass through the ring of stages, which keeps enough bytes on
// their way for the memory's full rate.
#pragma once

#include "cuda/params.h"
#include "cuda/sm90/tile.cuh"

namespace mok::cuda::sm90 {

constexpr float kNaN = __builtin_nanf("");

struct Float8 {
  float v[8];

  __device__ __forceinline__ void fill(float value) {
#pragma unroll
    for (float& one : v) one = value;
  }
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

// How the slots of a block of tokens go through the stages: one slot a stage, or, if it is too wide, as many columns as
// fit of every slot, then the next columns.
struct SlotPieces {
  static constexpr int32_t kColumns = kStageBytes / 2;
  int32_t h, top_k, slots;
  int64_t first_slot;

  __device__ __forceinline__ SlotPieces(const Shape& s, int32_t block) {
    h = static_cast<int32_t>(s.hidden);
    top_k = static_cast<int32_t>(s.top_k);
    first_slot = block * kReduceTokens * s.top_k;
    slots = static_cast<int32_t>(smaller(kReduceTokens * s.top_k, s.slots() - first_slot));
  }
  __device__ __forceinline__ int32_t count() const { return slots * ((h + kColumns - 1) / kColumns); }
};

// An even number, like all tasks'; the last one may be empty.
__device__ __forceinline__ int32_t reduce_stages(const Rank& rank, int32_t block) {
  return (SlotPieces(rank.shape, block).count() + 1) / 2 * 2;
}

__device__ __forceinline__ void load_slots(const Rank& rank, TileMemory& m, int32_t block, Stages& stages) {
  const SlotPieces p(rank.shape, block);
  const DeviceArena arena(rank.shape);
  const bf16* from = rank.in_arena<bf16>(rank.shape.rank, arena.at(arena.layout.slots)) + p.first_slot * p.h;
  for (int32_t first = 0; first < p.h; first += p.kColumns) {
    const uint32_t bytes = 2 * smaller(p.kColumns, p.h - first);
    for (int32_t i = 0; i < p.slots; ++i) {
      uint8_t* stage = stages.acquire(m, bytes);
      bulk_load(stage, from + int64_t{i} * p.h + first, bytes, stages.full(m));
      stages.advance();
    }
  }
  if (p.count() % 2 == 0) return;
  stages.acquire(m, 0);
  stages.advance();
}

// What the sum needs to know of a slot; loaded one slot ahead.
struct SlotTerm {
  int32_t id;
  float weight;
};

// By all math warps. In the backward slots carry the weight already.
template <bool kWeighted>
__device__ __forceinline__ void reduce_tokens(const Rank& rank, int64_t call, int32_t block, TileMemory& m,
                                              Stages& stages) {
  constexpr int32_t kVectors = SlotPieces::kColumns / (256 * 8);  // of 8 columns, a thread
  const SlotPieces p(rank.shape, block);
  const int32_t* ids = rank.in_arena<int32_t>(rank.shape.rank, DeviceArena(rank.shape).expert_ids(call)) + p.first_slot;
  const float* weights = rank.expert_weights + p.first_slot;
  const uint8_t* bad = rank.in_workspace<uint8_t>(WorkspaceLayout(rank.shape).bad) + block * kReduceTokens;
  const auto term = [&](int32_t i) { return SlotTerm{ids[i], kWeighted ? weights[i] : 1.f}; };
  const auto give_back = [&] {
    __syncwarp();
    if (arrives()) mbarrier_arrive(stages.empty(m));
    stages.advance();
  };
  for (int32_t first = 0; first < p.h; first += p.kColumns) {
    const int32_t columns = smaller(p.kColumns, p.h - first), own = thread_index() * 8;
    bf16* out = rank.out + block * kReduceTokens * p.h + first + own;
    SlotTerm next = term(0);
    for (int32_t slot = 0; slot < p.slots; out += p.h, ++bad) {
      Float8 sums[kVectors];
      for (Float8& sum : sums) sum.fill(*bad ? kNaN : 0.f);
      for (int32_t k = 0; k < p.top_k; ++k) {
        const SlotTerm now = next;
        next = term(smaller(++slot, p.slots - 1));
        const uint32_t stage = stages.wait_full(m) + own * 2;
        if (now.id >= 0) {
#pragma unroll
          for (int32_t v = 0; v < kVectors; ++v) {
            if (own + v * 2048 < columns) sums[v].add_scaled(load_shared(stage + v * 4096), now.weight);
          }
        }
        give_back();
      }
#pragma unroll
      for (int32_t v = 0; v < kVectors; ++v) {
        if (own + v * 2048 < columns) *reinterpret_cast<uint4*>(out + v * 2048) = sums[v].rounded();
      }
    }
    bad -= p.slots / p.top_k;
  }
  if (p.count() % 2 == 0) return;
  stages.wait_full(m);
  give_back();
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
