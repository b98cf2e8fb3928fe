// The fences that code which all architectures share asks for (KernelRank in params.h). The copy engine reads and
// writes through the asynchronous proxy, threads through the generic one.
#pragma once

#include "cuda/ptx.cuh"

namespace mok::cuda::sm90 {

struct Fences {
  __device__ static __forceinline__ void after_acquire() { fence_proxy_async(); }
  __device__ static __forceinline__ void before_release() { fence_proxy_async(); }
};

}  // namespace mok::cuda::sm90
