// A kernel that holds almost the whole device until it is told to stop, and streams that are waited for no longer than
// some seconds.
#pragma once

#include <algorithm>
#include <chrono>
#include <set>

#include "cuda/ptx.cuh"
#include "cuda/test/harness.cuh"

namespace mok::cuda::test {

inline constexpr int32_t kMost = 1024;  // CTAs of its kernels

struct Words {
  int32_t stop, timed_out;
  int32_t spins_on[kMost], probed_on[kMost];  // by CTA, 1 + the multiprocessor that it is on; 0: not yet there
};

inline __device__ int32_t multiprocessor() {
  int32_t i;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(i));
  return i;
}

// Holds its multiprocessor until the host says stop, or for `limit_ns`.
static __global__ void spin(volatile Words* words, uint64_t limit_ns) {
  if (threadIdx.x == 0) {
    words->spins_on[blockIdx.x] = 1 + multiprocessor();
    const uint64_t begin = nanoseconds();
    while (words->stop == 0) {
      __nanosleep(1000);
      if (nanoseconds() - begin < limit_ns) continue;
      words->timed_out = 1;
      break;
    }
  }
  __syncthreads();
}

static __global__ void probe(volatile Words* words) {
  if (threadIdx.x == 0) words->probed_on[blockIdx.x] = 1 + multiprocessor();
}

// Whether it was so within some seconds.
template <class Condition>
bool becomes_true(double seconds, const Condition& condition) {
  const auto begin = std::chrono::steady_clock::now();
  while (!condition()) {
    if (std::chrono::steady_clock::now() - begin > std::chrono::duration<double>(seconds)) return false;
  }
  return true;
}

class Stream {
 public:
  Stream() {
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    check(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming));
  }
  Stream(const Stream&) = delete;
  ~Stream() {
    cudaEventDestroy(event_);
    cudaStreamDestroy(stream_);
  }
  operator cudaStream_t() const { return stream_; }
  // Whether all that it has been given so far ends within some seconds.
  bool ends(double seconds) {
    check(cudaGetLastError());
    check(cudaEventRecord(event_, stream_));
    return becomes_true(seconds, [&] { return cudaEventQuery(event_) == cudaSuccess; });
  }

 private:
  cudaStream_t stream_ = nullptr;
  cudaEvent_t event_ = nullptr;
};

// Spins on all multiprocessors but `free` of them for as long as it lives, with all shared memory of each, so that no
// other CTA fits there.
class Spinning {
 public:
  Spinning(int32_t free, int32_t threads_of_others, int64_t shared_of_others) : ctas_(multiprocessors() - free) {
    const int shared = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
    check(cudaFuncSetAttribute(spin, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
    check(cudaFuncSetAttribute(probe, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_of_others)));
    spin<<<ctas_, 1024, shared, stream_>>>(words_.get(), 15'000'000'000);
    const volatile int32_t* on = words_->spins_on;
    if (!becomes_true(5, [&] { return std::all_of(on, on + ctas_, [](int32_t sm) { return sm != 0; }); })) {
      throw Failed("the spinning kernel did not become resident");
    }
    Stream others;
    probe<<<4 * multiprocessors(), threads_of_others, shared_of_others, others>>>(words_.get());
    if (!others.ends(5)) throw Failed("a small kernel did not end beside the spinning one");
    const std::set<int32_t> probed(words_->probed_on, words_->probed_on + 4 * multiprocessors());
    const std::set<int32_t> held(words_->spins_on, words_->spins_on + ctas_);
    for (int32_t sm : probed) {
      if (held.contains(sm)) throw Failed("CTAs fit beside those of the spinning kernel");
    }
    if (probed.size() > static_cast<size_t>(free)) throw Failed("more multiprocessors are free than was meant");
  }
  Spinning(const Spinning&) = delete;
  ~Spinning() { stop(); }

  // Whether it had been spinning until now.
  bool stop() {
    *static_cast<volatile int32_t*>(&words_->stop) = 1;
    cudaStreamSynchronize(stream_);
    return !words_->timed_out;
  }

 private:
  struct Stopping : Mapped<Words> {  // also where the constructor throws
    ~Stopping() {
      *static_cast<volatile int32_t*>(&get()->stop) = 1;
      cudaDeviceSynchronize();
    }
  };
  const int32_t ctas_;
  Stream stream_;
  Stopping words_;
};

}  // namespace mok::cuda::test
