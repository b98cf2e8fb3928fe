// What a warp that communicates moves passes through a ring in its shared memory, copy by copy. The warp loads them by
// itself, since the copy engine has enough to do with the products' operands. Each lane waits for, and uses, only what
// it has loaded, so that lanes need not meet.
#pragma once

#include "cuda/ptx.cuh"

namespace mok::cuda {

class CopyRing {
 public:
  static constexpr int32_t kBytes = 2048, kCount = 7;
  static constexpr int32_t kVectorBytes = 32 * 16, kVectors = kBytes / kVectorBytes;  // a lane has 16 bytes of each
  struct Memory {
    alignas(128) uint8_t bytes[kCount][kBytes];
  };

  __device__ __forceinline__ explicit CopyRing(Memory& memory)
      : begin_(shared_address(memory.bytes) + lane_index() * 16), copy_(begin_) {}

  // Begins to load the lane's vectors into the current place, and goes on to the next place: vectors that begin before
  // `bytes`, counted from the lane's first one at `from`. None, too, counts as a load.
  __device__ __forceinline__ void load(const uint8_t* from, int32_t bytes) {
#pragma unroll
    for (int32_t v = 0; v < kVectors; ++v) {
      async_copy_16(copy_ + v * kVectorBytes, from + v * kVectorBytes, v * kVectorBytes < bytes ? 16 : 0);
    }
    async_copy_commit();
    copy_ = after(copy_);
  }
  // At the end: loads of nothing, too, write zeros, which must not come into places that are in use again.
  __device__ __forceinline__ void finish() const { async_copy_wait<0>(); }
  // With kCount loads begun: until the one into the current place has ended. Returns the address in shared memory of
  // the lane's first vector, which the next load overwrites.
  __device__ __forceinline__ uint32_t wait() const {
    async_copy_wait<kCount - 1>();
    return current();
  }
  __device__ __forceinline__ uint32_t current() const { return copy_; }
  // The same for the place after the current one.
  __device__ __forceinline__ uint32_t wait_for_next() const {
    async_copy_wait<kCount - 2>();
    return after(copy_);
  }

 private:
  __device__ __forceinline__ uint32_t after(uint32_t copy) const {
    return copy == begin_ + (kCount - 1) * kBytes ? begin_ : copy + kBytes;
  }

  uint32_t begin_, copy_;
};

}  // namespace mok::cuda
