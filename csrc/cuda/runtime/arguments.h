// From a call's arrays, which hold all ranks one after the other, to the kernels' arguments of one rank.
#pragma once

#include "cuda/params.h"
#include "cuda/runtime/device.h"
#include "cuda/runtime/launch.h"

namespace mok::cuda {

// The i-th of several ranks' arrays of `size` elements; null where the call has none.
template <class T>
T* nth(T* data, int64_t i, int64_t size) {
  return data ? data + i * size : nullptr;
}

// Fills in all but tensor maps.
void fill(const ForwardCall& call, int32_t i, const Device& device, ForwardRank& rank);
void fill(const BackwardCall& call, int32_t i, const Device& device, BackwardRank& rank);

}  // namespace mok::cuda
