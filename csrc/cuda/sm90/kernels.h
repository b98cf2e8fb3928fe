// Hopper's kernels as the host launches them. Each takes one Launch of its direction, by value.
#pragma once

#include "cuda/sm90/arguments.h"

namespace mok::cuda::sm90 {

const void* forward_kernel();
const void* backward_kernel();
int64_t shared_bytes();
int32_t threads();
TileCounts tile_counts(const Shape& shape);

}  // namespace mok::cuda::sm90
