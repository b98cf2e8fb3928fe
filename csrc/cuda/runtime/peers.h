// Arenas that the GPUs of a group share: memory of each that all others read and write, by way of a window on XLA's
// own communicator.
#pragma once

#include <cstdint>

#include "cuda/runtime/error.h"
#include "cuda/workspace.h"

namespace mok::cuda {

// A group's arenas as one of its ranks reaches them. Never freed: captured graphs hold their addresses.
struct Peers {
  int32_t rank = 0;
  uint8_t* arenas[kMaxRanks] = {};
};

// How large a group's arena is. A function of the shape of a call, so that all ranks take the same one, for ever:
// calls of few different sizes share few arenas.
struct SizeClass {
  int64_t bytes;
  auto operator<=>(const SizeClass&) const = default;
};
SizeClass size_class(const Shape& shape);

// Makes the arenas of a communicator and a class on the current device, unless they are there. All ranks of the
// communicator do so together, and all succeed, or all get an error that says what is wrong and where.
Error make_peers(void* communicator, const Shape& shape);

// Null: they were not made.
const Peers* find_peers(void* communicator, const Shape& shape);

}  // namespace mok::cuda
