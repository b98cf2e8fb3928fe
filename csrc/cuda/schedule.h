// The schedule kernel as the host launches it. It takes one Launch of its direction, by value.
#pragma once

#include "cuda/params.h"

namespace mok::cuda {

const void* schedule_kernel(Direction direction);
int64_t schedule_shared_bytes(Direction direction, const Shape& shape);
int32_t schedule_threads();

}  // namespace mok::cuda
