// The kernels as the host launches them. Each takes one Launch of its direction, by value.
#pragma once

#include "cuda/params.h"

namespace mok::cuda {

const void* schedule_kernel(Direction direction);
int64_t schedule_shared_bytes(Direction direction, const Shape& shape);
int32_t schedule_threads();

namespace sm90 {
inline constexpr int32_t kPair = 2;  // CTAs of the layer kernels' clusters
const void* forward_kernel();
const void* backward_kernel();
inline const void* layer_kernel(Direction direction) {
  return direction == Direction::forward ? forward_kernel() : backward_kernel();
}
int64_t shared_bytes();
int32_t threads();
TileCounts tile_counts(const Shape& shape);
}  // namespace sm90

}  // namespace mok::cuda
