// What went wrong, as text, or nothing: what all functions of the runtime return.
#pragma once

#include <cuda_runtime.h>

#include <optional>
#include <string>

namespace mok::cuda {

using Error = std::optional<std::string>;

}  // namespace mok::cuda

// Ends the function that it stands in with what went wrong, if anything.
#define MOK_CUDA_TRY(call)                                                                                \
  if (const cudaError_t error = (call); error != cudaSuccess) {                                           \
    return std::string(#call) + " failed: " + cudaGetErrorName(error) + ", " + cudaGetErrorString(error); \
  }
