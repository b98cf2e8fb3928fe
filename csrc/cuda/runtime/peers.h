// Arenas that the GPUs of a group share: memory of each that all others read and write, by way of a window on XLA's
// own communicator.
#pragma once

#include <cstdint>

#include "cuda/runtime/error.h"
#include "moe/meeting.h"
#include "moe/shape.h"

namespace mok::cuda {

// A group as one of its ranks reaches it: where its ranks meet, and their arenas of one class. Never freed: captured
// graphs hold their addresses.
struct Peers {
  int32_t rank = 0;
  Meeting* meetings[kMaxRanks] = {};
  uint8_t* arenas[kMaxRanks] = {};
};

// Makes what a call of this shape needs of a communicator on the current device, unless it is there. All ranks of the
// communicator do so together, and all succeed, or all get an error that says what is wrong and where.
Error make_peers(void* communicator, const Shape& shape);

// Null: they were not made.
const Peers* find_peers(void* communicator, const Shape& shape);

}  // namespace mok::cuda
