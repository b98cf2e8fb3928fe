// Device memory of one call of one rank besides its results: what the schedule kernel hands to the layer's kernel. And
// the arena's header, the words through which ranks meet.
#pragma once

#include <bit>

#include "moe/arena.h"
#include "moe/program.h"

namespace mok::cuda {

inline constexpr int64_t kMaxRanks = 72;
inline constexpr int64_t kMaxScheduleChunks = 256;  // of a phase of the schedule kernel, of one rank

// Why a call ended early.
enum class FailureCode : int32_t {
  none = 0,
  timeout = 1,        // a wait inside the call took longer than timeout_s
  entry_timeout = 2,  // a peer did not start the call within entry_timeout_s
};

// All zero while nothing has failed.
struct Failure {
  int32_t code;  // a FailureCode, as the integer that atomics take
  int32_t rank;
  int32_t task;     // a TaskKind; -1: no task's, the schedule kernel's
  int32_t counter;  // which one was too low; of entry_timeout the peer
};

// At the begin of every rank's arena. Call numbers and counts only grow, over all calls.
struct ArenaHeader {
  int64_t call;    // calls that this rank has finished
  int64_t cycles;  // of all CTAs of the layer kernel, in all calls
  // By group of columns: rows that have come back, in all calls, to which peers add; and when the current call began.
  int64_t arrived[kColumnGroups], arrived_before[kColumnGroups];
  int64_t entered[kMaxRanks];  // by peer: the last call that it has begun
  Failure failure;             // sticky
};
inline constexpr int64_t kHeaderBytes = 4096;
static_assert(sizeof(ArenaHeader) <= kHeaderBytes);

// The arena on a GPU: header, the common layout, and a second buffer of expert ids, since no completion implies that
// peers have read the first.
struct DeviceArena {
  ArenaLayout layout;
  int64_t bytes;

  MOK_FN explicit DeviceArena(const Shape& s) : layout(s, 2) {
    bytes = kHeaderBytes + layout.bytes + round_up(s.slots() * 4, ArenaLayout::kAlignment);
  }
  MOK_FN int64_t at(int64_t offset) const { return kHeaderBytes + offset; }
  MOK_FN int64_t expert_ids(int64_t call) const {
    return call % 2 ? kHeaderBytes + layout.bytes : at(layout.expert_ids);
  }
};

// What is allocated: a power of two, so that few different needs lead to few arenas.
inline int64_t allocated_arena_bytes(const Shape& s) {
  return static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(DeviceArena(s).bytes)));
}

// What the schedule kernel decides.
struct Schedule {
  Plan plan;
  TaskList communication, compute;
  int64_t first_pulls;  // of the communication list: math warps run them before they compute
};

// Zero when a call begins.
struct WorkspaceHeader {
  int64_t first_pull_ticket, communication_ticket, compute_ticket;
  int64_t cycles;           // of the layer kernel's CTAs that have ended
  int32_t filled, counted;  // phases of the schedule kernel (see schedule/claims.cuh)
  int32_t valid_slots, bad_tokens;
  int32_t arrivals, departures;  // of the layer kernel's pairs of CTAs; of its CTAs
};

struct WorkspaceLayout {
  int64_t counters;  // int32, as CounterMap places them
  int64_t zeroed;    // bytes from the begin that must be zero
  int64_t schedule, expert_block, macro_block, communication, compute, bad, histogram;
  int64_t bytes;

  // Depends on the shape, its ring included, but not on the minibatch: arrays are sized before that is chosen.
  MOK_FN explicit WorkspaceLayout(Shape s) {
    s.minibatch_rows = kRowBlock;
    bytes = 0;
    take(sizeof(WorkspaceHeader));
    const int64_t pieces = max_macrobatches(s) + s.local_experts;
    counters = take(4 * (kBlockFamilies * (max_rows(s) / kRowBlock) + kPieceFamilies * pieces + kColumnGroups));
    zeroed = bytes;
    schedule = take(sizeof(Schedule));
    expert_block = take(4 * (s.local_experts + 1));
    macro_block = take(4 * (max_macrobatches(s) + 1));
    communication = take(max_segments(s) * static_cast<int64_t>(sizeof(Segment)));
    compute = take(max_segments(s) * static_cast<int64_t>(sizeof(Segment)));
    bad = take(s.tokens);
    histogram = take(4 * kMaxScheduleChunks * s.local_experts);
  }

 private:
  MOK_FN int64_t take(int64_t size) {
    const int64_t at = bytes;
    bytes += round_up(size, 256);
    return at;
  }
};

}  // namespace mok::cuda
