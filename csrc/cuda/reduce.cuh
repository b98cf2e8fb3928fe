// The final reduce of both directions: out[t] = sum over k, ascending, of (weight *) slot in f32, rounded once. Empty
// slots are skipped; rows of bad tokens are NaN. A task of communication warps, so that it costs the products nothing
// but the memory's time.
#pragma once

#include "cuda/copy_ring.cuh"
#include "cuda/params.h"

namespace mok::cuda {

constexpr float kNaN = __builtin_nanf("");

// 8 neighbouring columns.
struct Float8 {
  float v[8];

  __device__ __forceinline__ void fill(float value) {
#pragma unroll
    for (float& one : v) one = value;
  }
  __device__ __forceinline__ void add_scaled(const uint4& packed, float scale) {
    const uint32_t pairs[4] = {packed.x, packed.y, packed.z, packed.w};  // the high halves of floats
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      v[2 * i] = __fmaf_rn(scale, __uint_as_float(pairs[i] << 16), v[2 * i]);
      v[2 * i + 1] = __fmaf_rn(scale, __uint_as_float(pairs[i] & 0xffff0000), v[2 * i + 1]);
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

inline constexpr int32_t kSlotColumns = CopyRing::kBytes / 2,
                         kSlotVectors = CopyRing::kVectors;  // of 8 columns, a lane

// What a task's slots have in common: `width` columns of the slots of some tokens. Lies in shared memory, since the
// sums need the registers.
struct SlotBlock {
  const bf16* slots;  // those columns of the first one
  const int32_t* ids;
  const float* weights;
  const uint8_t* bad;
  bf16* out;
  int64_t h, first_slot;
  int32_t tokens, top_k, width;

  // A band of columns, counted in tiles; expert ids are those of this call.
  __device__ __forceinline__ void look_up(const Rank& rank, int64_t call, const Task& t, const ColumnBands& bands,
                                          int32_t tile_columns) {
    const Shape& s = rank.shape;
    const DeviceRows arena(s);
    const Range columns = bands.of(t.part);
    const int64_t first_token = t.block * kReduceTokens, first = columns.begin * tile_columns;
    h = s.hidden_size;
    top_k = static_cast<int32_t>(s.top_k);
    first_slot = first_token * top_k;
    tokens = static_cast<int32_t>(smaller(kReduceTokens, s.tokens - first_token));
    width = static_cast<int32_t>(smaller<int64_t>(columns.end * tile_columns, h) - first);
    slots = rank.in_arena<bf16>(s.rank, arena.slots) + first_slot * h + first;
    ids = rank.ids_in_arena(s.rank, call) + s.rank * s.slots() + first_slot;
    weights = rank.expert_weights + first_slot;
    bad = rank.in_workspace<uint8_t>(WorkspaceLayout(s).bad) + first_token;
    out = rank.out + first_token * h + first;
  }
};

// Half of a lane's vectors of a copy.
struct HalfCopy {
  static_assert(kSlotVectors % 2 == 0);
  static constexpr int32_t kVectors = kSlotVectors / 2;
  uint4 vectors[kVectors];

  __device__ __forceinline__ void load(uint32_t copy, int32_t half) {
#pragma unroll
    for (int32_t i = 0; i < kVectors; ++i) {
      vectors[i] = load_shared(copy + (half * kVectors + i) * CopyRing::kVectorBytes);
    }
  }
  __device__ __forceinline__ void add_to(Float8* sums, float scale) const {
#pragma unroll
    for (int32_t i = 0; i < kVectors; ++i) sums[i].add_scaled(vectors[i], scale);
  }
};

// A block's slots on their way: token by token, of each its columns, of each all slots. What every copy needs is in
// registers: a communication warp has its loop to itself, and nothing else to hide latencies.
class SlotStream {
 public:
  __device__ __forceinline__ SlotStream(const SlotBlock& b, CopyRing& copies)
      : copies_(copies), slot_bytes_(static_cast<int32_t>(b.h) * 2), top_k_(b.top_k), tokens_left_(b.tokens) {
    begin_columns(b);
    for (int32_t i = 0; i < CopyRing::kCount; ++i) load_next(b);
    first_.load(copies_.wait(), 0);
  }

  // Adds the current slot's columns, scaled, if it is `present`, and goes on to the next slot. One half of a copy
  // comes from shared memory while the other one is added; in one branch, so that the compiler mixes them.
  __device__ __forceinline__ void add(Float8 (&sums)[kSlotVectors], bool present, float scale, const SlotBlock& b) {
    if (present) {
      HalfCopy second;
      second.load(copies_.current(), 1);
      first_.add_to(sums, scale);
      first_.load(copies_.wait_for_next(), 0);
      second.add_to(sums + HalfCopy::kVectors, scale);
    } else {
      first_.load(copies_.wait_for_next(), 0);
    }
    load_next(b);
  }

 private:
  __device__ __forceinline__ void load_next(const SlotBlock& b) {
    copies_.load(from_, tokens_left_ > 0 ? bytes_ : 0);
    from_ += slot_bytes_;
    if (++k_ == top_k_) end_columns(b);
  }
  __device__ __forceinline__ void begin_columns(const SlotBlock& b) {
    const int32_t own = column_ + lane_index() * 8;
    from_ = reinterpret_cast<const uint8_t*>(b.slots + (b.tokens - tokens_left_) * b.top_k * b.h + own);
    bytes_ = (b.width - own) * 2;
  }
  __device__ __forceinline__ void end_columns(const SlotBlock& b) {
    k_ = 0;
    column_ += kSlotColumns;
    if (column_ >= b.width) {
      column_ = 0;
      --tokens_left_;
    }
    begin_columns(b);
  }

  CopyRing& copies_;
  HalfCopy first_;
  const uint8_t* from_;
  int32_t slot_bytes_, top_k_, tokens_left_, bytes_, column_ = 0, k_ = 0;  // bytes_: to this lane's right
};

// Of up to 32 slots of a token, from `first` on: this lane's, and which are not empty. In the backward slots carry the
// weight already.
template <bool kWeighted>
struct SlotTerms {
  int32_t id;
  float weight;
  bool bad;  // the token

  __device__ __forceinline__ void look_up(const SlotBlock& b, int32_t token, int32_t first) {
    const int32_t k = first + lane_index(), slot = token * b.top_k + k;
    const bool is_token = token < b.tokens, is_slot = is_token && k < b.top_k;
    bad = is_token && b.bad[token];
    id = is_slot ? b.ids[slot] : -1;
    weight = kWeighted && is_slot ? b.weights[slot] : 1.f;  // of an empty slot, too: no load waits for another
  }
  __device__ __forceinline__ void add_to(Float8 (&sums)[kSlotVectors], int32_t count, const SlotBlock& b,
                                         SlotStream& stream) const {
    uint32_t present = __ballot_sync(0xffffffff, id >= 0);
    for (int32_t k = 0; k < count; ++k, present >>= 1) {
      const float scale = kWeighted ? __shfl_sync(0xffffffff, weight, k) : 1.f;
      stream.add(sums, present & 1, scale, b);
    }
  }
};

template <bool kWeighted>
__device__ __forceinline__ void reduce_tokens(const SlotBlock& b, CopyRing& copies) {
  SlotTerms<kWeighted> next;  // a token ahead
  next.look_up(b, 0, 0);
  SlotStream stream(b, copies);
  for (int32_t token = 0; token < b.tokens; ++token) {
    SlotTerms<kWeighted> terms = next;
    next.look_up(b, token + 1, 0);
    for (int32_t column = 0; column < b.width; column += kSlotColumns) {
      Float8 sums[kSlotVectors];
#pragma unroll
      for (Float8& sum : sums) sum.fill(terms.bad ? kNaN : 0.f);
      for (int32_t k = 0; k < b.top_k; k += 32) {
        if (b.top_k > 32) terms.look_up(b, token, k);
        terms.add_to(sums, smaller(b.top_k - k, 32), b, stream);
      }
      const int32_t own = column + lane_index() * 8;
      bf16* out = b.out + token * b.h + own;
#pragma unroll
      for (int32_t v = 0; v < kSlotVectors; ++v) {
        const int32_t offset = v * (CopyRing::kVectorBytes / 2);
        if (own + offset < b.width) *reinterpret_cast<uint4*>(out + offset) = sums[v].rounded();
      }
    }
  }
  copies.finish();
}

// Router gradients of the same tokens: as they came; of empty slots 0, of bad tokens NaN.
__device__ __forceinline__ void collect_router_grads(const BackwardRank& rank, const SlotBlock& b) {
  const DeviceRows arena(rank.shape);
  const float* grads = rank.in_arena<float>(rank.shape.rank, arena.router_grads) + b.first_slot;
  float* to = rank.router_grads + b.first_slot;
  for (int32_t slot = lane_index(); slot < b.tokens * b.top_k; slot += 32) {
    to[slot] = b.bad[slot / b.top_k] ? kNaN : b.ids[slot] < 0 ? 0.f : __ldcg(grads + slot);
  }
}

template <KernelRank R>
__device__ __forceinline__ void run_reduce(const R& rank, int64_t call, const Task& t, SlotBlock& block,
                                           CopyRing& copies) {
  constexpr bool kForward = R::kDirection == Direction::forward;
  const TileCounts& tiles = rank.tiles;
  const ColumnBands bands = kForward ? down_bands(tiles) : row_grad_bands(tiles);
  if (lane_index() == 0) block.look_up(rank, call, t, bands, R::kTileColumns);
  __syncwarp();
  reduce_tokens<kForward>(block, copies);
  if constexpr (!kForward) {
    if (t.part == 0) collect_router_grads(rank, block);
  }
}

}  // namespace mok::cuda
