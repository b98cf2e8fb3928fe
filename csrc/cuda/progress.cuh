// Waits on other CTAs and other ranks: bounded, cancellable, and polled with back-off by one lane.
#pragma once

#include "cuda/params.h"
#include "cuda/ptx.cuh"

namespace mok::cuda {

// Records the first failure of the device: for every waiter here, and for the host.
inline __device__ __noinline__ void fail(const Rank& rank, FailureCode code, int32_t task, int32_t counter) {
  if (atomicCAS(&rank.device->failure.code, 0, static_cast<int32_t>(code)) != 0) return;
  rank.host_failure->rank = static_cast<int32_t>(rank.shape.rank);
  rank.host_failure->task = task;
  rank.host_failure->counter = counter;
  __threadfence_system();
  *reinterpret_cast<volatile int32_t*>(&rank.host_failure->code) = static_cast<int32_t>(code);
}

__device__ __forceinline__ bool failed(const Rank& rank) { return load_relaxed_sys(&rank.device->failure.code) != 0; }

// Until ready(); false: out of time (reported), or the call has failed elsewhere.
template <class Ready>
__device__ __forceinline__ bool wait_until(const Rank& rank, int64_t limit_ns, FailureCode code, int32_t task,
                                           int32_t counter, const Ready& ready) {
  if (ready()) return true;
  const uint64_t begin = nanoseconds();
  for (int32_t polls = 1;; ++polls) {
    __nanosleep(32);
    if (ready()) return true;
    if (polls % 256) continue;
    if (failed(rank)) return false;
    if (nanoseconds() - begin > static_cast<uint64_t>(limit_ns)) {
      fail(rank, code, task, counter);
      return false;
    }
  }
}

// Everything that a task waits for, acquired.
template <KernelRank R>
__device__ __forceinline__ bool wait_for_task(const R& rank, const CounterMap& map, const int32_t* counters,
                                              const Task& task) {
  for (int32_t i = 0; i < task.wait_count; ++i) {
    const Wait wait = task.waits[i];
    const ArenaHeader& arena = rank.arena_header(rank.shape.rank);
    const int32_t band = wait.counter - map.arrived(0);
    const bool ready =
        wait_until(rank, rank.timeout_ns, FailureCode::timeout, static_cast<int32_t>(task.kind), wait.counter, [&] {
          if (band < 0) return load_acquire_gpu(counters + wait.counter) >= wait.target;
          return load_acquire_sys(&arena.arrived[band]) - arena.arrived_before[band] >= wait.target;
        });
    if (!ready) return false;
  }
  R::Fences::after_acquire();
  return true;
}

}  // namespace mok::cuda
