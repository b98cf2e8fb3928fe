// Waits on other CTAs and other ranks: bounded, cancellable, and polled with back-off by one lane.
#pragma once

#include "cuda/params.h"
#include "cuda/ptx.cuh"

namespace mok::cuda {

// What a thread waits for. Of `limit_ns` the code says which limit it is.
struct Awaited {
  FailureCode code;
  int64_t limit_ns;
  int32_t task, counter;  // as in Failure
  int64_t target;
};

// Records the first failure of the device: for every waiter here, and for the host. Arguments are as in Failure, and in
// registers: in one struct they would be in local memory.
inline __device__ __noinline__ void fail(const Rank& rank, FailureCode code, int32_t task, int32_t counter,
                                         int64_t value, int64_t target) {
  if (atomicCAS(&rank.device->failure.code, 0, static_cast<int32_t>(code)) != 0) return;
  Failure& told = *rank.host_failure;
  told.rank = static_cast<int32_t>(rank.shape.rank);
  told.task = task;
  told.counter = counter;
  told.value = value;
  told.target = target;
  __threadfence_system();
  *reinterpret_cast<volatile int32_t*>(&told.code) = static_cast<int32_t>(code);
}

__device__ __forceinline__ bool failed(const Rank& rank) { return load_relaxed_sys(&rank.device->failure.code) != 0; }

// Until value() has reached its target; false: out of time (reported), or the call has failed elsewhere.
template <class Value>
__device__ __forceinline__ bool wait_until(const Rank& rank, const Awaited& what, const Value& value) {
  if (value() >= what.target) return true;
  const uint64_t begin = nanoseconds();
  for (int32_t polls = 1;; ++polls) {
    __nanosleep(32);
    const int64_t seen = value();
    if (seen >= what.target) return true;
    if (polls % 256) continue;
    if (failed(rank)) return false;
    if (nanoseconds() - begin > static_cast<uint64_t>(what.limit_ns)) {
      fail(rank, what.code, what.task, what.counter, seen, what.target);
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
    const Awaited what{FailureCode::timeout, rank.timeout_ns, static_cast<int32_t>(task.kind), wait.counter,
                       wait.target};
    const bool ready = wait_until(rank, what, [&]() -> int64_t {
      if (band < 0) return load_acquire_gpu(counters + wait.counter);
      return load_acquire_sys(&arena.arrived[band]) - arena.arrived_before[band];
    });
    if (!ready) return false;
  }
  R::Fences::after_acquire();
  return true;
}

}  // namespace mok::cuda
