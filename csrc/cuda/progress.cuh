// Waits on other CTAs and other ranks: bounded, cancellable, and polled with back-off by one lane.
#pragma once

#include "cuda/params.h"
#include "cuda/ptx.cuh"

namespace mok::cuda {

// Names a call among those of a device: no two at a time have the same workspace.
__device__ __forceinline__ unsigned long long token_of(const Rank& rank) {
  return reinterpret_cast<unsigned long long>(rank.workspace);
}
// Which call a rank is in: its token, or 0.
__device__ __forceinline__ unsigned long long* busy_of(Meeting& meeting) {
  return reinterpret_cast<unsigned long long*>(&meeting.progress.busy);
}

// What a thread waits for. Of `limit_ns` the code says which limit it is.
struct Awaited {
  FailureCode code;
  int64_t limit_ns;
  int32_t task, counter;  // as in Failure
  int64_t target;
};

// Records the first failure of the device: for every waiter here, and for the host. Arguments are as in Failure, and in
// registers: in one struct they would be in local memory. The peers learn of it when the rank leaves the call.
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

// Whether the call is to end early: something has failed on this device, or a peer has.
__device__ __forceinline__ bool failed(const Rank& rank) {
  return load_relaxed_sys(&rank.device->failure.code) != 0 || load_relaxed_sys(&rank.meeting().cancel.code) != 0;
}

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

// A call has failed: if here, every peer is told, whatever call it is in; if at a peer, the host is.
__device__ __forceinline__ void pass_failure_on(const Rank& rank) {
  const int32_t by = load_relaxed_sys(&rank.meeting().cancel.code);
  if (by != 0) return fail(rank, FailureCode::cancelled, -1, by - 1, 0, 0);
  const int32_t code = 1 + static_cast<int32_t>(rank.shape.rank);
  for (int64_t peer = 0; peer < rank.shape.ranks; ++peer) {
    if (peer != rank.shape.rank) store_relaxed_sys(&rank.meetings[peer]->cancel.code, code);
  }
}

// The rank leaves a call, by one thread, when all else of it is over. All of its rows have come back, and no peer adds
// more before this rank has entered its next call.
__device__ __forceinline__ void leave(const Rank& rank, int64_t call) {
  Meeting& meeting = rank.meeting();
  if (failed(rank)) pass_failure_on(rank);
  for (int32_t band = 0; band < kColumnBands; ++band) {
    meeting.progress.arrived_before[band] = load_acquire_sys(&meeting.arrived[band].rows);
  }
  meeting.progress.call = call;
  __threadfence();
  atomicCAS(busy_of(meeting), token_of(rank), 0ull);
}

// Everything that a task waits for, acquired.
template <KernelRank R>
__device__ __forceinline__ bool wait_for_task(const R& rank, const CounterMap& map, const int32_t* counters,
                                              const Task& task) {
  for (int32_t i = 0; i < task.wait_count; ++i) {
    const Wait wait = task.waits[i];
    const Meeting& meeting = rank.meeting();
    const int32_t band = wait.counter - map.arrived(0);
    const Awaited what{FailureCode::timeout, rank.timeout_ns, static_cast<int32_t>(task.kind), wait.counter,
                       wait.target};
    const bool ready = wait_until(rank, what, [&]() -> int64_t {
      if (band < 0) return load_acquire_gpu(counters + wait.counter);
      return load_acquire_sys(&meeting.arrived[band].rows) - meeting.progress.arrived_before[band];
    });
    if (!ready) return false;
  }
  R::Fences::after_acquire();
  return true;
}

}  // namespace mok::cuda
