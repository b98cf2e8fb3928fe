// Work that CTAs share without knowing how many of them there are. A phase is cut into chunks, which CTAs claim one
// after the other; it is complete when its chunks are. One CTA alone does all of them; one that comes late finds none
// left. Who waits for a phase waits for chunks that were claimed, so for CTAs that run: none need be resident at the
// same time as any other.
#pragma once

#include "cuda/progress.cuh"

namespace mok::cuda {

// A phase is a word in global memory, zero at first: how many chunks were claimed, and kDone times how many are
// complete. Every CTA claims once in vain at most, and there are fewer than kDone of those and of the chunks together.
inline constexpr int32_t kClaimed = 1, kDone = 1 << 16;

// One thread's: the number of a chunk, or of none that there is.
__device__ __forceinline__ int32_t claim(int32_t* phase) { return atomicAdd(phase, kClaimed) % kDone; }

// By all threads of a CTA, whose claim `chunk` is: visits it, and then others for as long as there are any. True: the
// CTA has completed the phase. `told` is shared memory.
//
// Memory order: the barrier orders what any thread of the CTA wrote in its chunk before its first thread's addition,
// which releases that to the device. All additions to the word are one release sequence, and each also acquires; so who
// makes the last one, or sees its result in wait_for, has acquired what all CTAs wrote in the phase, and by the barrier
// after it so have all threads of the CTA.
template <class Visit>
__device__ __forceinline__ bool work_off(int32_t* phase, int32_t chunks, int32_t chunk, int32_t& told,
                                         const Visit& visit) {
  bool complete = false;
  while (chunk < chunks) {
    visit(chunk);
    __syncthreads();
    if (threadIdx.x == 0) told = add_acq_rel_gpu(phase, kDone + kClaimed);
    __syncthreads();
    complete = told / kDone == chunks - 1;
    chunk = told % kDone;
  }
  return complete;
}

// By all threads of a CTA: until the phase is complete. False: failed.
__device__ __forceinline__ bool wait_for(const Rank& rank, const int32_t* phase, int32_t chunks) {
  bool passed = true;
  if (threadIdx.x == 0) {
    const Awaited complete{FailureCode::timeout, rank.timeout_ns, -1, -1, chunks};
    passed = wait_until(rank, complete, [&]() -> int64_t { return load_acquire_gpu(phase) / kDone; });
  }
  return __syncthreads_and(passed);
}

}  // namespace mok::cuda
