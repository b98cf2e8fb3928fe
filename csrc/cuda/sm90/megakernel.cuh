// The skeleton of both megakernels on Hopper: one persistent CTA per SM. In each, a scheduler warp claims compute tasks
// and waits for what they need; a producer warp loads their tiles for two math warpgroups; a store warp stores or
// pushes what these have staged; a communication warp pulls rows and reduces tokens. CTAs take their roles in the order
// in which they arrive. What the tasks of a direction are is in forward.cu and backward.cu, as a Work:
//   using Rank                         its arguments
//   look_up(rank, plan, task)          fills in what a QueuedTask knows
//   load(rank, s, task, stages)        loads the stages; by one lane
//   compute(rank, s, task, math)       by all math warps
//   store(rank, s, arena, task, side)  by the store warp
//   spoil(rank)                        makes results NaN, after a failure
#pragma once

#include "cuda/communicate.cuh"
#include "cuda/kernels.h"
#include "cuda/sm90/tile.cuh"

namespace mok::cuda::sm90 {

inline constexpr int32_t kMathWarps = 8, kSchedulerWarp = 8, kProducerWarp = 9, kStoreWarp = 10,
                         kCommunicationWarp = 11;
inline constexpr int32_t kWarps = 12, kThreads = kWarps * 32;
inline constexpr int32_t kQueue = 4;  // tasks that are ready, under way, or being stored
inline constexpr TaskKind kStop = static_cast<TaskKind>(-1);

// A task with all that its CTA's warps need to know of the plan, so that none of them stops to look.
struct QueuedTask : Task {
  int32_t ring_row;     // of its (first) block
  int32_t real_rows;    // of its block; not of a piece (weight_grad)
  int32_t steps;        // of its product; a stage each
  int32_t chunks;       // stages after them, for its epilogue
  bool begun, goes_on;  // weight_grad: an earlier macrobatch has begun the expert; a later one has more of it
};

struct Shared {
  TileMemory tiles;  // first: stages need the strongest alignment
  CommunicationBuffer communication;
  Schedule schedule;
  QueuedTask queue[kQueue];
  uint64_t queue_full[kQueue], queue_empty[kQueue];
  int64_t call;   // this one's number
  int64_t began;  // cycle
  int32_t here, arrival, goes_on;
};
static_assert(sizeof(Shared) <= 232448);
static_assert(kMathWarps * sizeof(CommunicationBuffer) <= sizeof(TileMemory::stages));

// ---- The scheduler: one lane. Tasks that it has claimed wait in order; only their loads wait for them.

template <class Work>
__device__ __forceinline__ void look_up(const typename Work::Rank& rank, const Plan& plan, QueuedTask& task) {
  task.ring_row = plan.ring_block(task.block) * static_cast<int32_t>(kRowBlock);
  task.chunks = 0;
  Work::look_up(rank, plan, task);
}

template <class Work>
__device__ __forceinline__ void schedule(const typename Work::Rank& rank, Shared& s) {
  const CounterMap map(s.schedule.plan);
  const int32_t* counters = rank.template in_workspace<int32_t>(WorkspaceLayout(rank.shape).counters);
  for (Turn<kQueue> turn;; turn.advance()) {
    mbarrier_wait(&s.queue_empty[turn.slot()], turn.parity() ^ 1);
    QueuedTask& task = s.queue[turn.slot()];
    const int64_t ticket = atomicAdd(reinterpret_cast<unsigned long long*>(&rank.header().compute_ticket), 1ull);
    task.kind = kStop;
    if (ticket < s.schedule.compute.tasks) {
      write_task(rank, s.schedule.plan, s.schedule.compute, ticket, task);
      look_up<Work>(rank, s.schedule.plan, task);
      if (!wait_for_task(rank, map, counters, task)) task.kind = kStop;
    }
    mbarrier_arrive(&s.queue_full[turn.slot()]);
    if (task.kind == kStop) return;
  }
}

// Calls work(task) for every task of the queue, by a whole warp.
template <class Step>
__device__ __forceinline__ void for_each_task(Shared& s, const Step& work) {
  for (Turn<kQueue> turn;; turn.advance()) {
    mbarrier_wait(&s.queue_full[turn.slot()], turn.parity());
    const QueuedTask& task = s.queue[turn.slot()];
    if (task.kind == kStop) return;
    work(task);
    __syncwarp();
    if (arrives()) mbarrier_arrive(&s.queue_empty[turn.slot()]);
  }
}

// ---- The producer: one lane.

template <class Work>
__device__ __forceinline__ void produce(const typename Work::Rank& rank, Shared& s) {
  Stages stages;
  for_each_task(s, [&](const QueuedTask& task) {
    if (lane_index() == 0) Work::load(rank, s, task, stages);
  });
}

// ---- Math warpgroups.

// What a math thread keeps from task to task.
struct Math {
  Stages stages;
  Staging staging;

  // Accumulators live no longer than their task: registers that survived it would be copied around each product.
  template <Layout layout, bool kAccumulate = false>
  __device__ __forceinline__ void multiply(Accumulators& acc, Shared& s, int32_t steps) {
    sm90::multiply<layout, kAccumulate>(acc, s.tiles, thread_index() / 128, steps, stages);
  }
  // A warpgroup whose rows of a block are all padding lets the block's tiles pass, and leaves the tensor cores and the
  // power to the other one. Nobody reads what the rings then hold in these rows.
  __device__ __forceinline__ static bool has_rows(const QueuedTask& t) {
    return thread_index() / 128 * kGroupRows < t.real_rows;
  }
  __device__ __forceinline__ void pass_steps(Shared& s, int32_t steps) {
    for (int32_t step = 0; step < steps; ++step) pass_stage(s, stages.empty(s.tiles));
  }
  __device__ __forceinline__ void pass_stage(Shared& s, uint64_t* done) {
    stages.wait_full(s.tiles);
    __syncwarp();
    if (arrives()) mbarrier_arrive(done);
    stages.advance();
  }
  // Rows side by side, to be pushed.
  __device__ __forceinline__ void stage_rows(const Accumulators& acc, Shared& s) {
    staging.acquire(s.tiles);
    const uint32_t address = Staging::row_address(s.tiles);
#pragma unroll
    for (int32_t i = 0; i < kAccumulators / 8; ++i) Staging::write_row(address, i, acc + 8 * i);
    staging.release(s.tiles);
  }
  // This thread's place in its warpgroup's staging area, for vectors of 16 bytes.
  __device__ __forceinline__ uint32_t park_address(Shared& s) {
    return shared_address(s.tiles.staging[thread_index() / 128]) + thread_index() % 128 * 16;
  }
  // Until all threads of this warpgroup are here; barrier 0 is the CTA's.
  __device__ __forceinline__ void meet_warpgroup() { named_barrier(1 + thread_index() / 128, 128); }
  // Nothing is staged; the store warp learns that this warpgroup's own stores are issued, and signals.
  __device__ __forceinline__ void stage_nothing(Shared& s) {
    fence_proxy_async();
    staging.acquire(s.tiles);
    staging.release(s.tiles);
  }
};

template <class Work>
__device__ __forceinline__ void compute(const typename Work::Rank& rank, Shared& s) {
  Math math;
  for_each_task(s, [&](const QueuedTask& task) { Work::compute(rank, s, task, math); });
}

// ---- The store warp.

// Each row of the tile goes straight to its slot at its source.
__device__ __forceinline__ void push_rows(const Rank& rank, const DeviceArena& arena, const QueuedTask& t, Shared& s,
                                          StoreSide& side) {
  const int64_t h = rank.shape.hidden, column = t.part * kTileColumns;
  const uint32_t bytes = static_cast<uint32_t>(2 * smaller<int64_t>(kTileColumns, h - column));
  for (int32_t group = 0; group < 2; ++group) {
    const uint8_t* staged = side.acquire(s.tiles, group);
    for (int32_t i = lane_index(); i < smaller(kGroupRows, t.real_rows - group * kGroupRows); i += 32) {
      const RowSource to = rank.row_table[t.block * kRowBlock + group * kGroupRows + i];
      bf16* slot = rank.in_arena<bf16>(to.rank, arena.at(arena.layout.slots)) + to.slot * h + column;
      bulk_store(slot, staged + i * kStagingPitch, bytes);
    }
    side.release(s.tiles, group);
  }
  side.advance();
}

template <class Work>
__device__ __forceinline__ void store(const typename Work::Rank& rank, Shared& s) {
  const DeviceArena arena(rank.shape);
  int32_t* counters = rank.template in_workspace<int32_t>(WorkspaceLayout(rank.shape).counters);
  StoreSide side;
  for_each_task(s, [&](const QueuedTask& task) {
    Work::store(rank, s, arena, task, side);
    bulk_wait_all();
    fence_proxy_async();
    __syncwarp();
    if (lane_index() == 0) signal(task, counters);
    side.skip(task.steps + task.chunks);
  });
}

// ---- The CTA.

// What a CTA does: both, each in warps of its own, or only one.
struct Role {
  bool computes, communicates;
};

// When a CTA's stages are no longer used, its math warps turn to what is left of the communication list; those of a CTA
// that only communicates do at once.
template <class Work>
__device__ __forceinline__ void run_cta(const typename Work::Rank& rank, Shared& s, Role role) {
  constexpr int32_t kBarrier = 3, kUsers = (kMathWarps + 1) * 32;  // math warps and the store warp
  const int32_t warp = thread_index() / 32;
  if (warp < kMathWarps) {
    take_registers<kMathRegisters>();
    if (role.computes) {
      compute<Work>(rank, s);
      named_barrier(kBarrier, kUsers);
    }
    CommunicationBuffer* buffers = reinterpret_cast<CommunicationBuffer*>(s.tiles.stages);
    communicate(rank, s.schedule, s.call, buffers[warp]);
    return;
  }
  give_registers<kServiceRegisters>();
  if (warp == kCommunicationWarp) {
    if (role.communicates) communicate(rank, s.schedule, s.call, s.communication);
  } else if (!role.computes) {
    return;
  } else if (warp == kSchedulerWarp) {
    if (lane_index() == 0) schedule<Work>(rank, s);
  } else if (warp == kProducerWarp) {
    produce<Work>(rank, s);
  } else {
    store<Work>(rank, s);
    named_barrier(kBarrier, kUsers);
  }
}

// The first CTA of a rank to arrive communicates, the second computes, so that two are enough for all to finish.
template <class R>
__device__ __forceinline__ bool is_communication_cta(const Launch<R>& launch, int32_t order) {
  return launch.communication_ctas > 0 && order != 1 && order - (order > 1) < launch.communication_ctas;
}

__device__ __forceinline__ void initialise(Shared& s) {
  for (int32_t i = 0; i < kQueue; ++i) {
    mbarrier_init(&s.queue_full[i], 1);
    mbarrier_init(&s.queue_empty[i], (kMathWarps + 2) * kArrivals);  // and producer and store warp
  }
  s.tiles.initialise();
  fence_mbarrier_init();
}

template <class T>
__device__ void fill_nan(T* data, int64_t count) {
  for (int64_t i = thread_index(); i < count; i += kThreads) data[i] = T(kNaN);
}

// The rank's last CTA ends its call; float results of a call that has failed are NaN.
template <class Work>
__device__ __forceinline__ void depart(const Launch<typename Work::Rank>& launch, const typename Work::Rank& rank,
                                       Shared& s) {
  __threadfence();
  __syncthreads();
  bool last = false;
  if (thread_index() == 0) {
    atomicAdd(reinterpret_cast<unsigned long long*>(&rank.header().cycles), clock64() - s.began);
    __threadfence();
    const int32_t ranks = launch.ranks_here, ctas = (static_cast<int32_t>(gridDim.x) - s.here + ranks - 1) / ranks;
    last = atomicAdd(&rank.header().departures, 1) == ctas - 1;
    __threadfence();
  }
  if (!__syncthreads_or(last)) return;
  if (failed(rank)) Work::spoil(rank);
  if (thread_index() == 0) {
    ArenaHeader& header = rank.arena_header(rank.shape.rank);
    for (int32_t group = 0; group < kColumnGroups; ++group) {  // peers come with more only when this call has ended
      header.arrived_before[group] = load_acquire_sys(&header.arrived[group]);
    }
    header.cycles += *reinterpret_cast<volatile int64_t*>(&rank.header().cycles);
    header.call = s.call;
  }
}

template <class Work>
__device__ __forceinline__ void run(const Launch<typename Work::Rank>& launch) {
  extern __shared__ __align__(1024) uint8_t memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  // Arrival a serves rank a mod ranks, so that every rank soon has its CTAs, whichever are resident.
  if (thread_index() == 0) {
    s.began = clock64();
    s.arrival = atomicAdd(&launch.rank(0).header().arrivals, 1);
    s.here = s.arrival % launch.ranks_here;
    initialise(s);
  }
  __syncthreads();
  const typename Work::Rank& rank = launch.rank(s.here);
  if (thread_index() == 0) {
    s.call = rank.arena_header(rank.shape.rank).call + 1;
    s.goes_on = !failed(rank);  // read once: a peer may fail at any time, and the CTA's threads must agree
    if (s.goes_on) s.schedule = *rank.template in_workspace<Schedule>(WorkspaceLayout(rank.shape).schedule);
  }
  __syncthreads();
  if (s.goes_on) {
    const bool communicates_only = is_communication_cta(launch, s.arrival / launch.ranks_here);
    run_cta<Work>(rank, s, {!communicates_only, communicates_only || launch.communication_ctas == 0});
  }
  depart<Work>(launch, rank, s);
}

}  // namespace mok::cuda::sm90
