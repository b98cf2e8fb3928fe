// The schedule kernel as the host launches it, which takes one Launch of its direction, by value; and what is launched
// where it cannot be.
#pragma once

#include "cuda/params.h"

namespace mok::cuda {

const void* schedule_kernel(Direction direction);
int64_t schedule_shared_bytes(Direction direction, const Shape& shape);
int32_t schedule_threads();

// Takes the arguments of a Rank that cannot begin its call, by value, and is run by one thread: tells its peers.
const void* abort_kernel();

}  // namespace mok::cuda
