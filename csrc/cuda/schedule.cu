// The schedule kernel: fills the rank's arena, meets the other ranks, and builds the row table (in the forward; it is
// the backward's residual), the macrobatches and the task lists, bit for bit those of csrc/moe. The host learns nothing
// and waits for nothing.
#include "cuda/progress.cuh"
#include "cuda/schedule.h"
#include "moe/lists.h"

namespace mok::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;

// One CTA of those that schedule one rank.
struct Block {
  const Rank& rank;
  const DeviceArena arena;
  const WorkspaceLayout layout;
  const int32_t index, count;
  const int64_t call;

  __device__ Block(const Rank& r, int32_t index, int32_t count)
      : rank(r), arena(r.shape), layout(r.shape), index(index), count(count), call(r.call()) {}

  // All CTAs of the rank; their earlier writes are visible afterwards. False: failed.
  __device__ bool barrier(int32_t number) {
    __threadfence();
    __syncthreads();
    bool passed = true;
    if (threadIdx.x == 0) {
      int32_t* arrived = &rank.header().barrier;
      add_release_gpu(arrived, 1);
      const Awaited all{FailureCode::timeout, rank.timeout_ns, -1, -1, number * count};
      passed = wait_until(rank, all, [&]() -> int64_t { return load_acquire_gpu(arrived); });
    }
    return __syncthreads_and(passed);
  }
};

// Copies [T, H] into the rank's arena.
__device__ void stage(const Block& b, const bf16* from, int64_t offset) {
  const Shape& s = b.rank.shape;
  const uint4* source = reinterpret_cast<const uint4*>(from);
  uint4* to = b.rank.in_arena<uint4>(s.rank, b.arena.at(offset));
  const int64_t step = int64_t{b.count} * kThreads, count = s.tokens * s.hidden_size / 8;
#pragma unroll 4
  for (int64_t i = int64_t{b.index} * kThreads + threadIdx.x; i < count; i += step) to[i] = __ldcs(source + i);
}

// What peers will read: x, dy, router weights, clean expert ids. Counts the rank's own slots and bad tokens.
__device__ void fill_arena(Block& b) {
  const Rank& rank = b.rank;
  const Shape& s = rank.shape;
  if (s.ranks > 1) {  // alone, the rank reads its rows where they are
    stage(b, rank.x, b.arena.layout.x);
    if (rank.dy) stage(b, rank.dy, b.arena.layout.dy);
  }
  const int64_t first = int64_t{b.index} * kThreads + threadIdx.x, step = int64_t{b.count} * kThreads;
  float* weights = rank.in_arena<float>(s.rank, b.arena.at(b.arena.layout.weights));
  for (int64_t i = first; i < s.slots(); i += step) weights[i] = rank.expert_weights[i];

  int32_t* clean = rank.in_arena<int32_t>(s.rank, b.arena.expert_ids(b.call));
  uint8_t* bad = rank.in_workspace<uint8_t>(b.layout.bad);
  int32_t valid_slots = 0, bad_tokens = 0;
  for (int64_t t = first; t < s.tokens; t += step) {
    Shape one = s;
    one.tokens = 1;
    const int64_t slot = t * s.top_k;
    bad_tokens += clean_expert_ids(one, rank.expert_ids + slot, clean + slot, bad + t);
    for (int64_t k = 0; k < s.top_k; ++k) valid_slots += clean[slot + k] >= 0;
  }
  if (valid_slots) atomicAdd(&rank.header().valid_slots, valid_slots);
  if (bad_tokens) atomicAdd(&rank.header().bad_tokens, bad_tokens);
}

// Tells every rank that this one has begun the call, and waits until all have. Alone, the rank has an arena that is new
// with the call.
__device__ bool meet(Block& b) {
  const Rank& rank = b.rank;
  if (rank.shape.ranks == 1) {
    ArenaHeader& header = rank.arena_header(0);
    if (b.index == 0 && threadIdx.x < kColumnBands)
      header.arrived[threadIdx.x] = header.arrived_before[threadIdx.x] = 0;
    return true;
  }
  ArenaHeader& mine = rank.arena_header(rank.shape.rank);
  bool here = true;
  const int64_t peer = threadIdx.x;
  if (peer < rank.shape.ranks) {
    if (b.index == 0) store_release_sys(&rank.arena_header(peer).entered[rank.shape.rank], b.call);
    const Awaited entry{FailureCode::entry_timeout, rank.entry_timeout_ns, -1, static_cast<int32_t>(peer), b.call};
    here = wait_until(rank, entry, [&] { return load_acquire_sys(&mine.entered[peer]); });
  }
  return __syncthreads_and(here);
}

// A warp's share of all ranks' slots, in canonical order. visit(local expert or -1, rank, slot) by whole warps.
template <class Visit>
__device__ void for_each_slot(const Block& b, const Visit& visit) {
  const Shape& s = b.rank.shape;
  const int32_t slots = static_cast<int32_t>(s.slots()), total = static_cast<int32_t>(s.ranks) * slots;
  const int32_t warps = b.count * kWarps, warp = b.index * kWarps + static_cast<int32_t>(threadIdx.x) / 32;
  const int32_t share = static_cast<int32_t>(round_up(ceil_div(total, warps), 32));
  const int64_t begin = int64_t{warp} * share, end = smaller<int64_t>(begin + share, total);
  const int32_t first_expert = static_cast<int32_t>(s.rank * s.local_experts);
  for (int64_t i = begin + threadIdx.x % 32; i - threadIdx.x % 32 < end; i += 32) {
    int32_t expert = -1, rank = 0, slot = 0;
    if (i < end) {
      rank = static_cast<int32_t>(i) / slots;
      slot = static_cast<int32_t>(i) % slots;
      expert = load_relaxed_sys(b.rank.in_arena<int32_t>(rank, b.arena.expert_ids(b.call)) + slot) - first_expert;
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

__device__ void count_slots(const Block& b, const Tables& t) {
  for (int32_t i = threadIdx.x; i < kWarps * t.experts; i += kThreads) t.next[i] = 0;
  __syncthreads();
  int32_t* mine = t.warp_next();
  for_each_slot(b, [&](int32_t expert, int32_t, int32_t) {
    if (expert >= 0) atomicAdd(mine + expert, 1);
  });
  __syncthreads();
  int32_t* histogram = b.rank.in_workspace<int32_t>(b.layout.histogram);
  for (int32_t e = threadIdx.x; e < t.experts; e += kThreads) {
    int32_t sum = 0;
    for (int32_t w = 0; w < kWarps; ++w) sum += t.next[w * t.experts + e];
    histogram[int64_t{e} * b.count + b.index] = sum;
  }
}

// From all CTAs' histograms, [experts, CTAs]: rows and first block of every expert, and where each warp of this CTA
// begins to write. A warp an expert.
__device__ void find_places(const Block& b, const Tables& t) {
  const int32_t* histogram = b.rank.in_workspace<int32_t>(b.layout.histogram);
  const int32_t lane = threadIdx.x % 32;
  for (int32_t e = threadIdx.x / 32; e < t.experts; e += kWarps) {
    int32_t total = 0, before = 0;
    for (int32_t other = lane; other < b.count; other += 32) {
      const int32_t rows = __ldcg(histogram + int64_t{e} * b.count + other);
      total += rows;
      if (other < b.index) before += rows;
    }
    total = __reduce_add_sync(0xffffffff, total);
    before = __reduce_add_sync(0xffffffff, before);
    if (lane != 0) continue;
    t.expert_rows[e] = total;
    for (int32_t w = 0; w < kWarps; ++w) {
      const int32_t rows = t.next[w * t.experts + e];
      t.next[w * t.experts + e] = before;
      before += rows;
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) place_experts(t.experts, t.expert_rows, t.expert_block);
  __syncthreads();
}

__device__ void write_rows(const Block& b, const Tables& t) {
  RowSource* rows = b.rank.row_table;
  int32_t* next = t.warp_next();
  for_each_slot(b, [&](int32_t expert, int32_t rank, int32_t slot) {
    const uint32_t same = __match_any_sync(0xffffffff, expert);
    const int32_t lane = threadIdx.x % 32, order = __popc(same & ((1u << lane) - 1));
    if (expert >= 0) rows[t.expert_block[expert] * kRowBlock + next[expert] + order] = {rank, slot};
    __syncwarp();
    if (expert >= 0 && order == 0) next[expert] += __popc(same);
    __syncwarp();
  });
  for (int32_t e = b.index; e < t.experts; e += b.count) {
    const int64_t end = t.expert_block[e + 1] * kRowBlock;
    for (int64_t row = t.expert_block[e] * kRowBlock + t.expert_rows[e] + threadIdx.x; row < end; row += kThreads) {
      rows[row] = {-1, -1};
    }
  }
}

// Writes, by one thread, what the layer's kernel runs by; expert_rows and the table of first blocks are in place.
template <Direction direction>
__device__ void write_schedule(const Block& b) {
  const Rank& rank = b.rank;
  const Shape& s = rank.shape;
  Schedule& schedule = *rank.in_workspace<Schedule>(b.layout.schedule);
  Plan p;
  make_plan(s, rank.tiles, rank.save, rank.header().valid_slots, rank.expert_rows,
            rank.in_workspace<int32_t>(b.layout.expert_block), rank.in_workspace<int32_t>(b.layout.macro_block), p);
  TaskList communication{rank.in_workspace<Segment>(b.layout.communication)};
  TaskList compute{rank.in_workspace<Segment>(b.layout.compute)};
  fill_lists<direction>(p, communication, compute);
  schedule.plan = p;
  schedule.communication = communication;
  schedule.compute = compute;
  schedule.first_pulls = communication.first_pulls();
}

__device__ __forceinline__ bool begin(Block& b) {
  if (__syncthreads_or(failed(b.rank))) return false;
  fill_arena(b);
  return b.barrier(1) && meet(b);
}

template <class R>
__device__ __forceinline__ Block block_of(const Launch<R>& launch) {
  const int32_t ranks = launch.ranks_here, index = static_cast<int32_t>(blockIdx.x);
  return Block(launch.rank(index % ranks), index / ranks, static_cast<int32_t>(gridDim.x) / ranks);
}

__global__ void __launch_bounds__(kThreads, 1) schedule_forward(const __grid_constant__ Launch<ForwardRank> launch) {
  extern __shared__ int32_t memory[];
  Block b = block_of(launch);
  const Tables t(static_cast<int32_t>(b.rank.shape.local_experts), memory);
  if (!begin(b)) return;
  count_slots(b, t);
  if (!b.barrier(2)) return;
  find_places(b, t);
  write_rows(b, t);
  if (b.index != b.count - 1) return;  // the last one has the fewest rows to write, often none
  int32_t* expert_block = b.rank.in_workspace<int32_t>(b.layout.expert_block);
  for (int32_t e = threadIdx.x; e <= t.experts; e += kThreads) {
    expert_block[e] = t.expert_block[e];
    if (e < t.experts) b.rank.expert_rows[e] = t.expert_rows[e];
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  *launch.rank(static_cast<int32_t>(blockIdx.x) % launch.ranks_here).bad_tokens = b.rank.header().bad_tokens;
  write_schedule<Direction::forward>(b);
}

__global__ void __launch_bounds__(kThreads, 1) schedule_backward(const __grid_constant__ Launch<BackwardRank> launch) {
  Block b = block_of(launch);
  if (!begin(b) || b.index != 0 || threadIdx.x != 0) return;
  place_experts(static_cast<int32_t>(b.rank.shape.local_experts), b.rank.expert_rows,
                b.rank.in_workspace<int32_t>(b.layout.expert_block));
  write_schedule<Direction::backward>(b);
}

}  // namespace

const void* schedule_kernel(Direction direction) {
  return direction == Direction::forward ? reinterpret_cast<const void*>(schedule_forward)
                                         : reinterpret_cast<const void*>(schedule_backward);
}
// Of the forward's Tables.
int64_t schedule_shared_bytes(Direction direction, const Shape& s) {
  return direction == Direction::forward ? 4 * (kWarps * s.local_experts + 2 * s.local_experts + 1) : 0;
}
int32_t schedule_threads() { return kThreads; }

}  // namespace mok::cuda
