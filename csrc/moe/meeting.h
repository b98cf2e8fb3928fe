// The words through which the ranks of a group meet: there is one Meeting of each rank and group, whatever the classes
// of its calls' arenas. Were they a part of an arena, ranks that are in calls of different classes would not find each
// other, and who waits in the next class's call would not hear that a peer has failed.
//
// What peers write has a line of its own. Call numbers and counts only grow. docs/algorithm.md tells the protocol, and
// csrc/verify/protocol.h proves it.
#pragma once

#include "moe/plan.h"

namespace mok {

inline constexpr int64_t kMaxRanks = 72;  // of an NVLink domain
// Of what ranks write for each other: raise it with every change of that, and builds that differ refuse each other.
inline constexpr int32_t kProtocol = 1;
inline constexpr int64_t kLineBytes = 128;

// Which of two places is a call's. Two are enough: who leaves call n + 1 has met a rank that has left call n, so that
// nobody is in call n while another is in n + 2.
MOK_FN constexpr int32_t parity_of(int64_t call) { return static_cast<int32_t>(call & 1); }

// Written by one peer: first the hash of what it means to call, then, with a release, the number of the call.
struct alignas(kLineBytes) Entry {
  int64_t call;      // the last one that the peer has begun
  uint64_t hash[2];  // by parity: a peer may be one call ahead
};

// Added to by all ranks.
struct alignas(kLineBytes) Arrivals {
  int64_t rows;  // that have come back, in all calls
};

// Raised by whoever fails, at every peer. Sticky.
struct alignas(kLineBytes) Cancel {
  int32_t code;  // 0: go on
};

// Of the rank alone.
struct alignas(kLineBytes) Progress {
  int64_t call;                          // the last one that it has left
  int64_t arrived_before[kColumnBands];  // of Arrivals, when it left
  uint64_t busy;                         // who is in a call: the address of its workspace; 0: nobody
};

struct Meeting {
  Progress progress;
  Cancel cancel;
  Arrivals arrived[kColumnBands];  // by band of columns
  Entry entries[kMaxRanks];        // by peer
};

}  // namespace mok
