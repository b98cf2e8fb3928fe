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
// communicator do so together, and all succeed, or all are refused for the same reason; who waits longer than
// entry_timeout_s for the others is refused, then and ever after. Returns nothing, as a launch returns the refusal: XLA
// ends the process if one of several devices fails before a call is executed.
void make_peers(void* communicator, const Shape& shape, double entry_timeout_s);

// What make_peers has made last for such a call, or why it has not.
Error find_peers(void* communicator, const Shape& shape, const Peers*& peers);

}  // namespace mok::cuda
