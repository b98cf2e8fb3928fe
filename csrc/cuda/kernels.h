// The kernels as the host launches them. Each takes one Launch, by value.
#pragma once

#include "cuda/params.h"

namespace mok::cuda {

const void* schedule_forward_kernel();
int64_t schedule_shared_bytes(const Shape& shape);
int32_t schedule_threads();

namespace sm90 {
const void* forward_kernel();
int64_t forward_shared_bytes();
int32_t forward_threads();
TileCounts tile_counts(const Shape& shape);
}  // namespace sm90

}  // namespace mok::cuda
