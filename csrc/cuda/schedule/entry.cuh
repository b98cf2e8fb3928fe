// How a rank begins a call: its CTAs fill the arena that peers read, and meet them.
#pragma once

#include "cuda/schedule/claims.cuh"
#include "moe/chunks.h"

namespace mok::cuda {

inline constexpr int32_t kThreads = 256, kWarps = kThreads / 32;

// One rank as a CTA sees it. Few slots make few chunks, and CTAs without one leave; otherwise there are as many chunks
// as the host names.
struct Block {
  const Rank& rank;
  const DeviceRows arena;
  const WorkspaceLayout layout;
  const int64_t call;
  const int32_t fill_chunks, count_chunks;

  __device__ Block(const Rank& r, int32_t most_chunks)
      : rank(r),
        arena(r.shape),
        layout(r.shape),
        call(r.call()),
        fill_chunks(chunks_for(larger(r.shape.slots(), staged_vectors() / 4), kThreads, most_chunks)),
        count_chunks(chunks_for(counted_slots(), kThreads, most_chunks)) {}

  // Of all ranks; a chunk also has padding rows to write.
  __device__ int64_t counted_slots() const {
    return larger(rank.shape.ranks * rank.shape.slots(), max_rows(rank.shape) / 4);
  }
  // What is copied into the arena for peers. Alone, the rank reads its rows where they are.
  __device__ int64_t staged_vectors() const {
    const Shape& s = rank.shape;
    return s.ranks > 1 ? (rank.dy ? 2 : 1) * s.tokens * s.hidden_size / 8 : 0;
  }
};

// Copies a chunk of [T, H] into the rank's arena.
inline __device__ void stage(const Block& b, int32_t chunk, const bf16* from, int64_t offset) {
  const Shape& s = b.rank.shape;
  const uint4* source = reinterpret_cast<const uint4*>(from);
  uint4* to = b.rank.in_arena<uint4>(s.rank, offset);
  const int64_t step = int64_t{b.fill_chunks} * kThreads, count = s.tokens * s.hidden_size / 8;
#pragma unroll 4
  for (int64_t i = int64_t{chunk} * kThreads + threadIdx.x; i < count; i += step) to[i] = __ldcs(source + i);
}

// A token's clean ids to every peer, which makes its row table from its own arena alone. The backward has that table.
inline __device__ void push_ids(const Block& b, const int32_t* ids, int64_t place) {
  const Shape& s = b.rank.shape;
  for (int64_t i = 1; i < s.ranks; ++i) {
    int32_t* to = b.rank.ids_in_arena((s.rank + i) % s.ranks, b.call) + place;
    for (int64_t k = 0; k < s.top_k; ++k) to[k] = ids[k];
  }
}

// What peers will read: x, dy, router weights, clean expert ids. Counts the rank's own slots and bad tokens.
inline __device__ void fill_arena(const Block& b, int32_t chunk) {
  const Rank& rank = b.rank;
  const Shape& s = rank.shape;
  if (b.staged_vectors() > 0) {
    stage(b, chunk, rank.x, b.arena.x);
    if (rank.dy) stage(b, chunk, rank.dy, b.arena.dy);
  }
  const int64_t first = int64_t{chunk} * kThreads + threadIdx.x, step = int64_t{b.fill_chunks} * kThreads;
  float* weights = rank.in_arena<float>(s.rank, b.arena.weights);
  for (int64_t i = first; i < s.slots(); i += step) weights[i] = rank.expert_weights[i];

  const int64_t own = s.rank * s.slots();
  int32_t* clean = rank.ids_in_arena(s.rank, b.call) + own;
  uint8_t* bad = rank.in_workspace<uint8_t>(b.layout.bad);
  int32_t valid_slots = 0, bad_tokens = 0;
  for (int64_t t = first; t < s.tokens; t += step) {
    Shape one = s;
    one.tokens = 1;
    const int64_t slot = t * s.top_k;
    bad_tokens += clean_expert_ids(one, rank.expert_ids + slot, clean + slot, bad + t);
    for (int64_t k = 0; k < s.top_k; ++k) valid_slots += clean[slot + k] >= 0;
    if (!rank.dy) push_ids(b, clean + slot, own + slot);
  }
  if (valid_slots) atomicAdd(&rank.header().valid_slots, valid_slots);
  if (bad_tokens) atomicAdd(&rank.header().bad_tokens, bad_tokens);
}

// Whether the rank is in no other call, by one thread of every CTA: the first of a call to come marks it, and the
// call's end takes the mark away. So each CTA knows by itself, before it has written anything.
__device__ __forceinline__ bool is_alone(const Rank& rank) {
  if (rank.shape.ranks == 1) return true;
  const unsigned long long token = token_of(rank), marked = atomicCAS(busy_of(rank.meeting()), 0ull, token);
  if (marked == 0 || marked == token) return true;
  fail(rank, FailureCode::concurrent, -1, -1, 0, 0);
  return false;
}

// Whether the mesh gives the rank the number that the communicator has given it, by which it finds its peers.
__device__ __forceinline__ bool is_in_place(const Rank& rank) {
  if (!rank.where || *rank.where == rank.shape.rank) return true;
  fail(rank, FailureCode::misplaced, -1, *rank.where, 0, 0);
  return false;
}

// Claims the first chunk to fill; `told` is shared memory. False: the call has failed.
__device__ __forceinline__ bool begin(const Block& b, int32_t& told) {
  bool ended = false;
  if (threadIdx.x == 0) {
    const int32_t chunk = claim(&b.rank.header().filled);
    ended = failed(b.rank) || !is_alone(b.rank) || !is_in_place(b.rank);  // asked while the claim is on its way
    told = chunk;
  }
  return !__syncthreads_or(ended);
}

// Fills what the CTA can claim of the arena. True: that is full, by this CTA's last chunk.
__device__ __forceinline__ bool fill(const Block& b, int32_t& told) {
  return work_off(&b.rank.header().filled, b.fill_chunks, told, told, [&](int32_t chunk) { fill_arena(b, chunk); });
}

// Tells every rank that this one has begun the call and filled its arena: by the CTA that has completed the filling,
// which has acquired what all others wrote (claims.cuh). A release at the scope of the system passes that on, as
// causality goes through all scopes: who acquires the word may read the rank's arena, and what it wrote into theirs.
__device__ __forceinline__ void publish(const Block& b) {
  const Rank& rank = b.rank;
  const int64_t peer = threadIdx.x;
  if (peer >= rank.shape.ranks) return;
  Entry& entry = rank.meetings[peer]->entries[rank.shape.rank];
  entry.hash[parity_of(b.call)] = rank.hash;
  store_release_sys(&entry.call, b.call);
}

// Until all ranks have begun the call, this one among them: by that word its own CTAs too learn that its arena is full.
// And all must mean the same call.
__device__ __forceinline__ bool meet(const Block& b) {
  const Rank& rank = b.rank;
  bool here = true;
  const int64_t peer = threadIdx.x;
  if (peer < rank.shape.ranks) {
    const Entry& entry = rank.meeting().entries[peer];
    const bool own = peer == rank.shape.rank;
    const Awaited entered{own ? FailureCode::timeout : FailureCode::entry_timeout,
                          own ? rank.timeout_ns : rank.entry_timeout_ns, -1, own ? -1 : static_cast<int32_t>(peer),
                          b.call};
    here = wait_until(rank, entered, [&] { return load_acquire_sys(&entry.call); });
    if (here && load_relaxed_sys(&entry.hash[parity_of(b.call)]) != rank.hash) {
      fail(rank, FailureCode::disagreement, -1, static_cast<int32_t>(peer), 0, 0);
      here = false;
    }
  }
  return __syncthreads_and(here);
}

}  // namespace mok::cuda
