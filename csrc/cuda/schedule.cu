// The schedule kernel: fills the rank's arena, meets the other ranks, and builds the row table (in the forward; it is
// the backward's residual), the macrobatches and the task lists, bit for bit those of csrc/moe. The host learns nothing
// and waits for nothing.
//
// The CTAs of a rank claim its work in chunks (schedule/claims.cuh), of two phases: filling the arena, and in the
// forward counting all ranks' slots by expert. Who has counted a chunk also writes its rows, once all chunks are
// counted. One resident CTA is enough: other kernels may hold all multiprocessors but one until this kernel has ended.
#include "cuda/schedule.h"
#include "cuda/schedule/row_table.cuh"
#include "moe/lists.h"

namespace mok::cuda {
namespace {

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

// The tables in place, the call's schedule is written by the last warp of the last chunk, before it writes its rows: it
// has the fewest of all, often none.
__device__ __forceinline__ void finish(const Block& b, const Tables& t, int32_t* bad_tokens) {
  int32_t* expert_block = b.rank.in_workspace<int32_t>(b.layout.expert_block);
  for (int32_t e = threadIdx.x; e <= t.experts; e += kThreads) {
    expert_block[e] = t.expert_block[e];
    if (e < t.experts) b.rank.expert_rows[e] = t.expert_rows[e];
  }
  __syncthreads();
  if (threadIdx.x == kThreads - 32) {
    *bad_tokens = b.rank.header().bad_tokens;
    write_schedule<Direction::forward>(b);
  }
  __syncwarp();
}

// Virtual ranks take turns, so that a few CTAs are of all of them.
template <class R>
__device__ __forceinline__ const R& rank_of(const Launch<R>& launch) {
  return launch.rank(static_cast<int32_t>(blockIdx.x) % launch.ranks_here);
}

// What this CTA has claimed, in shared memory.
struct Claims {
  int32_t fill, count;              // what its first thread was told last
  int32_t own[kMaxScheduleChunks];  // that it has counted
};

__global__ void __launch_bounds__(kThreads, 1) schedule_forward(const __grid_constant__ Launch<ForwardRank> launch) {
  extern __shared__ int32_t memory[];
  __shared__ Claims claims;
  const ForwardRank& rank = rank_of(launch);
  const Block b(rank, launch.schedule_chunks);
  const Tables t(static_cast<int32_t>(rank.shape.local_experts), memory);
  if (!begin(b, claims.fill)) return;
  const bool full = fill(b, claims.fill);
  int32_t* phase = &rank.header().counted;
  const int32_t first = threadIdx.x == 0 ? claim(phase) : 0;  // on its way while the CTA publishes
  if (full) publish(b);
  if (threadIdx.x == 0) claims.count = first;
  __syncthreads();
  if (claims.count >= b.count_chunks || !meet(b)) return;

  int32_t counted = 0;
  const bool complete = work_off(phase, b.count_chunks, claims.count, claims.count, [&](int32_t chunk) {
    if (threadIdx.x == 0) claims.own[counted] = chunk;
    ++counted;
    count_slots(b, t, chunk);
    write_histogram(b, t, chunk);
  });
  if (!complete && !wait_for(rank, phase, b.count_chunks)) return;

  // Shared memory still has the counts by warp of the chunk counted last. Where a CTA has others, it counts them again:
  // the ids are in the cache, while a histogram by warp would be eight times as large, and all would have to read it.
  for (int32_t i = counted - 1; i >= 0; --i) {
    const int32_t chunk = claims.own[i];
    if (i < counted - 1) {
      __syncthreads();  // all warps have written their rows of the chunk before
      count_slots(b, t, chunk);
    }
    find_places(b, t, chunk);
    if (chunk == b.count_chunks - 1) finish(b, t, rank.bad_tokens);
    write_rows(b, t, chunk);
  }
}

__global__ void __launch_bounds__(kThreads, 1) schedule_backward(const __grid_constant__ Launch<BackwardRank> launch) {
  __shared__ int32_t told;
  const Block b(rank_of(launch), launch.schedule_chunks);
  if (!begin(b, told) || !fill(b, told)) return;
  publish(b);
  if (threadIdx.x == 0) {
    place_experts(static_cast<int32_t>(b.rank.shape.local_experts), b.rank.expert_rows,
                  b.rank.in_workspace<int32_t>(b.layout.expert_block));
    write_schedule<Direction::backward>(b);
  }
  meet(b);
}

__global__ void abort_call(const __grid_constant__ Rank rank) {
  fail(rank, FailureCode::aborted, -1, -1, 0, 0);
  pass_failure_on(rank);
}

}  // namespace

const void* abort_kernel() { return reinterpret_cast<const void*>(abort_call); }
const void* schedule_kernel(Direction direction) {
  return direction == Direction::forward ? reinterpret_cast<const void*>(schedule_forward)
                                         : reinterpret_cast<const void*>(schedule_backward);
}
// Of the forward's Tables; its Claims are in shared memory too.
int64_t schedule_shared_bytes(Direction direction, const Shape& s) {
  return direction == Direction::forward ? 4 * (kWarps * s.local_experts + 2 * s.local_experts + 1) : 0;
}
int32_t schedule_threads() { return kThreads; }

}  // namespace mok::cuda
