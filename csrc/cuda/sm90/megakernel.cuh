// The skeleton of both megakernels on Hopper: one persistent CTA per SM, in pairs. In each, a scheduler warp gets
// compute tasks and waits for what they need; a producer warp loads their tiles for two math warpgroups; a store warp
// stores or pushes what these have staged; a communication warp pulls rows and reduces tokens, and so do math warps
// before their first and after their last task. CTAs take their roles in the order in which pairs arrive. What the
// tasks of a direction are is in forward.cu and backward.cu, as a Work (work.cuh); how warps wait for each other is in
// barriers.cuh.
#pragma once

#include "cuda/communicate.cuh"
#include "cuda/sm90/fences.cuh"
#include "cuda/sm90/math.cuh"
#include "cuda/sm90/scheduler.cuh"
#include "cuda/sm90/store.cuh"
#include "cuda/sm90/work.cuh"

namespace mok::cuda::sm90 {

// ---- The producer: one lane.

template <Work W>
__device__ __forceinline__ void produce(const typename W::Rank& rank, Shared& s) {
  Loader loader;
  for_each_task(s, [&](const QueuedTask& task) {
    if (lane_index() != 0) return;
    loader.begin(s.tiles, task.shared, task.left_out);
    W::load(rank, s, task, loader);
  });
}

// ---- Math warpgroups.

template <Work W>
__device__ __forceinline__ void compute(const typename W::Rank& rank, Shared& s) {
  Math math;
  while (true) {
    const Product product = math.take(s);
    if (product.kind == kStop) return;
    math.pass_steps(s, product.left_out, 0);
    W::compute(rank, s, s.queue[math.turn.place()], product, math);
    math.finish(s);
  }
}

// ---- The store warp.

template <Work W>
__device__ __forceinline__ void store(const typename W::Rank& rank, Shared& s) {
  const DeviceRows arena(rank.shape);
  int32_t* counters = rank.template in_workspace<int32_t>(WorkspaceLayout(rank.shape).counters);
  StoreSide side;
  for_each_task(s, [&](const QueuedTask& task) {
    side.skip(task.left_out);
    W::store(rank, s, arena, task, side);
    bulk_wait_all();
    Fences::before_release();
    __syncwarp();
    if (lane_index() == 0) signal(task, counters);
    side.skip(task.steps + task.chunks);
  });
}

// ---- The CTA.

// A call begins with nothing to compute: math warps pull the first rows, all warps of a CTA one task at a time.
template <class R>
__device__ __forceinline__ void pull_first(const R& rank, Shared& s) {
  static_assert(kPullRows % kMathWarps == 0);
  const int32_t warp = thread_index() / 32;
  const Schedule& schedule = s.schedule;
  const DeviceRows arena(rank.shape);
  int32_t* counters = rank.template in_workspace<int32_t>(WorkspaceLayout(rank.shape).counters);
  CommunicationBuffer *buffers = math_buffers(s), &common = buffers[0];
  CopyRing copies(buffers[warp].copies);
  while (true) {
    if (thread_index() == 0) {
      const int64_t ticket = add(rank.header().first_pull_ticket, 1);
      common.go_on = ticket < schedule.first_pulls;
      if (common.go_on) {
        write_task<R::kDirection>(schedule.plan, schedule.communication.segments[0], ticket, common.task);
      }
    }
    named_barrier(kPullBarrier, kMathWarps * 32);
    if (!common.go_on) break;
    run_pull(rank, schedule.plan, arena, common.task, pulled_rows(common.task, warp, kMathWarps), copies);
    Fences::before_release();
    named_barrier(kPullBarrier, kMathWarps * 32);
    if (thread_index() == 0) signal(common.task, counters);
  }
  fence_proxy_async_shared();  // operands come into the same memory
}

// Before a CTA's stages are used, its math warps pull first rows; when they are no longer used, the warps turn to what
// is left of the communication list. Those of a CTA that only communicates do at once.
template <Work W>
__device__ __forceinline__ void run_cta(const typename W::Rank& rank, Shared& s, const Roles& roles) {
  constexpr int32_t kUsers = (kMathWarps + 1) * 32;  // of the stages: math warps, and the producer or the store warp
  const int32_t warp = thread_index() / 32, cta = cluster_rank();
  const bool computes = roles.computes(cta);
  if (warp < kMathWarps) {
    take_registers<kMathRegisters>();
    if (computes) {
      pull_first(rank, s);
      named_barrier(kBeginBarrier, kUsers);
      compute<W>(rank, s);
      named_barrier(kEndBarrier, kUsers);
    }
    communicate(rank, s.schedule, s.call, math_buffers(s)[warp]);
    return;
  }
  give_registers<kServiceRegisters>();
  if (warp == kCommunicationWarp) {
    if (roles.communicates(cta)) communicate(rank, s.schedule, s.call, s.communication);
  } else if (!computes) {
    return;
  } else if (warp == kSchedulerWarp) {
    if (lane_index() == 0) Scheduler<W>(rank, s, roles).run();
  } else if (warp == kProducerWarp) {
    named_barrier(kBeginBarrier, kUsers);
    produce<W>(rank, s);
  } else {
    store<W>(rank, s);
    named_barrier(kEndBarrier, kUsers);
  }
}

__device__ __forceinline__ void initialise(Shared& s) {
  for (int32_t i = 0; i < kQueue; ++i) {
    mbarrier_init(&s.queue_full[i], 1);
    mbarrier_init(&s.queue_empty[i], (kMathWarps + 2) * kArrivals);  // and producer and store warp
  }
  s.mailbox.initialise();
  s.tiles.initialise();
  fence_mbarrier_init();
}

template <class T>
__device__ void fill_nan(T* data, int64_t count) {
  for (int64_t i = thread_index(); i < count; i += kThreads) data[i] = T(kNaN);
}

// The rank's last CTA ends its call; float results of a call that has failed are NaN.
template <Work W>
__device__ __forceinline__ void depart(const Launch<typename W::Rank>& launch, const typename W::Rank& rank,
                                       Shared& s) {
  __threadfence();
  cluster_barrier();  // nobody needs this CTA's shared memory any more
  bool last = false, spoils = false;
  if (thread_index() == 0) {
    add(rank.device->cycles, clock64() - s.began);
    __threadfence();
    const int32_t ranks = launch.ranks_here, pairs = static_cast<int32_t>(gridDim.x) / kPair;
    last = atomicAdd(&rank.header().departures, 1) == (pairs - s.here + ranks - 1) / ranks * kPair - 1;
    __threadfence();
    spoils = last && failed(rank);  // asked once: all threads must agree
  }
  if (!__syncthreads_or(last)) return;
  if (__syncthreads_or(spoils)) W::spoil(rank);
  if (thread_index() == 0) {
    leave(rank, s.call);
    add(rank.device->calls, 1);
  }
}

// Arrival a serves rank a mod ranks, so that every rank soon has its pairs, whichever are resident. The first CTA
// decides for both: a peer may fail at any time, and all threads must agree on whether the call goes on.
template <Work W>
__device__ __forceinline__ void arrive(const Launch<typename W::Rank>& launch, Shared& s) {
  cluster_barrier();  // both are here
  if (thread_index() == 0 && cluster_rank() == 0) {
    const int32_t arrival = atomicAdd(&launch.rank(0).header().arrivals, 1), here = arrival % launch.ranks_here;
    const int32_t goes_on = !failed(launch.rank(here));
    for (int32_t cta = 0; cta < kPair; ++cta) {
      store_cluster(cluster_address(&s.arrival, cta), arrival);
      store_cluster(cluster_address(&s.here, cta), here);
      store_cluster(cluster_address(&s.goes_on, cta), goes_on);
    }
  }
  cluster_barrier();
}

template <Work W>
__device__ __forceinline__ void run(const Launch<typename W::Rank>& launch) {
  extern __shared__ __align__(1024) uint8_t memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  if (thread_index() == 0) {
    s.began = clock64();
    initialise(s);
  }
  arrive<W>(launch, s);
  const typename W::Rank& rank = launch.rank(s.here);
  if (thread_index() == 0) {
    s.call = rank.call();
    if (s.goes_on) s.schedule = *rank.template in_workspace<Schedule>(WorkspaceLayout(rank.shape).schedule);
  }
  __syncthreads();
  if (s.goes_on) run_cta<W>(rank, s, roles_of(launch, s.arrival));
  depart<W>(launch, rank, s);
}

}  // namespace mok::cuda::sm90
