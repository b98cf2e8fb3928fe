// The row table as CTAs build it: csrc/moe/chunks.h in parallel.
#pragma once

#include "cuda/schedule/entry.cuh"

namespace mok::cuda {

// A warp's share of a chunk of all ranks' slots, in canonical order. visit(local expert or -1, rank, slot) by whole
// warps.
template <class Visit>
__device__ __forceinline__ void for_each_slot(const Block& b, int32_t chunk, const Visit& visit) {
  const Shape& s = b.rank.shape;
  const int32_t warp = chunk * kWarps + static_cast<int32_t>(threadIdx.x) / 32, slots = static_cast<int32_t>(s.slots());
  const SlotRange share = slots_of_share(s, warp, b.count_chunks * kWarps, 32);
  const int32_t* ids = b.rank.ids_in_arena(s.rank, b.call);
  const int32_t first_expert = static_cast<int32_t>(s.rank * s.local_experts);
  for (int64_t begin = share.begin; begin < share.end; begin += 32) {
    const int64_t i = begin + threadIdx.x % 32;
    int32_t expert = -1, rank = 0, slot = 0;
    if (i < share.end) {
      rank = static_cast<int32_t>(i) / slots;
      slot = static_cast<int32_t>(i) % slots;
      expert = load_relaxed_sys(ids + i) - first_expert;
      if (expert < 0 || expert >= s.local_experts) expert = -1;
    }
    visit(expert, rank, slot);
  }
}

// Shared tables of a CTA: [kWarps][experts] of next rows (first counts), [experts + 1] of first row blocks, [experts]
// of rows.
struct Tables {
  int32_t experts;
  int32_t *next, *expert_block, *expert_rows;

  __device__ explicit Tables(int32_t experts, int32_t* memory)
      : experts(experts),
        next(memory),
        expert_block(next + kWarps * experts),
        expert_rows(expert_block + experts + 1) {}
  __device__ int32_t* warp_next() const { return next + threadIdx.x / 32 * experts; }
};

__device__ __forceinline__ void count_slots(const Block& b, const Tables& t, int32_t chunk) {
  for (int32_t i = threadIdx.x; i < kWarps * t.experts; i += kThreads) t.next[i] = 0;
  __syncthreads();
  int32_t* mine = t.warp_next();
  for_each_slot(b, chunk, [&](int32_t expert, int32_t, int32_t) {
    if (expert >= 0) atomicAdd(mine + expert, 1);
  });
  __syncthreads();
}

// Tells all CTAs what is in the chunk: the histogram is [experts, chunks].
__device__ __forceinline__ void write_histogram(const Block& b, const Tables& t, int32_t chunk) {
  int32_t* histogram = b.rank.in_workspace<int32_t>(b.layout.histogram);
  for (int32_t e = threadIdx.x; e < t.experts; e += kThreads) {
    int32_t sum = 0;
    for (int32_t w = 0; w < kWarps; ++w) sum += t.next[w * t.experts + e];
    histogram[int64_t{e} * b.count_chunks + chunk] = sum;
  }
}

// From the histogram: rows and first block of every expert, and where each warp begins to write the chunk that this CTA
// has counted last. A warp an expert.
__device__ __forceinline__ void find_places(const Block& b, const Tables& t, int32_t chunk) {
  const int32_t* histogram = b.rank.in_workspace<int32_t>(b.layout.histogram);
  const int32_t lane = threadIdx.x % 32;
  for (int32_t e = threadIdx.x / 32; e < t.experts; e += kWarps) {
    const int32_t* of_expert = histogram + int64_t{e} * b.count_chunks;
    ChunkedRows rows =
        add_chunks([&](int32_t other) { return __ldcg(of_expert + other); }, chunk, b.count_chunks, lane, 32);
    rows.total = __reduce_add_sync(0xffffffff, rows.total);
    rows.before = __reduce_add_sync(0xffffffff, rows.before);
    if (lane != 0) continue;
    t.expert_rows[e] = rows.total;
    place_shares(rows.before, kWarps, t.experts, t.next + e);
  }
  __syncthreads();
  if (threadIdx.x == 0) place_experts(t.experts, t.expert_rows, t.expert_block);
  __syncthreads();
}

// The chunk's rows, and padding of some experts.
__device__ __forceinline__ void write_rows(const Block& b, const Tables& t, int32_t chunk) {
  RowSource* rows = b.rank.row_table;
  int32_t* next = t.warp_next();
  for_each_slot(b, chunk, [&](int32_t expert, int32_t rank, int32_t slot) {
    const uint32_t same = __match_any_sync(0xffffffff, expert);
    const int32_t lane = threadIdx.x % 32, order = __popc(same & ((1u << lane) - 1));
    if (expert >= 0) rows[t.expert_block[expert] * kRowBlock + next[expert] + order] = {rank, slot};
    __syncwarp();
    if (expert >= 0 && order == 0) next[expert] += __popc(same);
    __syncwarp();
  });
  for (int32_t e = chunk; e < t.experts; e += b.count_chunks) {
    const int64_t end = t.expert_block[e + 1] * kRowBlock;
    for (int64_t row = t.expert_block[e] * kRowBlock + t.expert_rows[e] + threadIdx.x; row < end; row += kThreads) {
      rows[row] = {-1, -1};
    }
  }
}

}  // namespace mok::cuda
