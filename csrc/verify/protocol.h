// The protocol between calls, explored: every state that the ranks of a group can reach while they make their sequences
// of calls, whoever is fast or slow, and whoever fails. docs/algorithm.md tells the protocol in words.
//
// A step of a rank touches one word of a Meeting (moe/meeting.h), or begins or ends a stretch of time in which it
// touches arenas (footprint.h). That is enough to find every conflict: two accesses that no wait orders can also be
// made at the same time, in some reachable state. What is looked for:
// - Two ranks, or two calls of one rank, touch the same bytes at the same time, and one of them writes.
// - A rank takes a peer's call for another one, or another one for its own.
// - Nothing can happen any more, except that somebody runs out of time, but not all calls have ended. Since every step
//   goes forward, this is all there is to a rank that waits for ever.
// - After a failure a later call of the rank ends well, or the rank's host does not learn of it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "verify/sequence.h"

namespace mok::verify {

struct Exploration {
  int64_t states = 0;
  int32_t furthest_ahead = 0;      // calls that one rank has been ahead of another
  std::string error;               // the first that was found, or nothing
  std::vector<std::string> steps;  // that lead to it
};

Exploration explore(const Sequence& sequence, Flaw flaw);

}  // namespace mok::verify
