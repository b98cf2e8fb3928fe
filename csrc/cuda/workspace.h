// Device memory of one call of one rank besides its results: what the schedule kernel hands to the layer's kernel. And
// what a device keeps over all calls.
#pragma once

#include "moe/arena.h"
#include "moe/meeting.h"
#include "moe/program.h"

namespace mok::cuda {

inline constexpr int64_t kMaxScheduleChunks = 256;  // of a phase of the schedule kernel, of one rank

// Why a call ended early.
enum class FailureCode : int32_t {
  none = 0,
  timeout = 1,        // a wait inside the call took longer than timeout_s
  entry_timeout = 2,  // a peer did not start the call within entry_timeout_s
  cancelled = 3,      // a peer has failed
  disagreement = 4,   // a peer is in another call
  concurrent = 5,     // another call of the same group runs on the device
  aborted = 6,        // the host could not launch the call
  misplaced = 7,      // the mesh and the communicator number the ranks of a group differently
};

// The first of a device. All zero while nothing has failed.
struct Failure {
  int32_t code;  // a FailureCode, as the integer that atomics take
  int32_t rank;
  int32_t task;  // a TaskKind; -1: no task's, the schedule kernel's
  // Which counter was too low; of entry_timeout, cancelled and disagreement the peer; of misplaced the mesh's rank.
  int32_t counter;
  int64_t value, target;  // what it was, and what it had to be
};

// What outlives all calls on a device. Of its kernels, the failure makes those that are enqueued already leave at once.
struct DeviceState {
  int64_t calls;   // finished, of all ranks
  int64_t cycles;  // of all CTAs of the layer kernel, in all calls
  Failure failure;
};

// What of an arena on a GPU depends on the shape of a call. Alone, a rank reads x and dy where they are.
struct DeviceRows : RowsLayout {
  MOK_FN explicit DeviceRows(const Shape& s) : RowsLayout(s, 2, s.ranks > 1) {}
};

// The arena of a rank whose peers are all in one place: a part of the call's workspace, and as large as the call needs.
MOK_FN SharedArenaLayout local_arena(const Shape& s) {
  return SharedArenaLayout(s.ranks * s.slots(), DeviceRows(s).bytes);
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
  int32_t filled, counted;  // phases of the schedule kernel (see schedule/claims.cuh)
  int32_t valid_slots, bad_tokens;
  int32_t arrivals, departures;  // of the layer kernel's pairs of CTAs; of its CTAs
};

struct WorkspaceLayout {
  int64_t meeting;   // where all ranks of the call are here
  int64_t counters;  // int32, as CounterMap places them
  int64_t zeroed;    // bytes from the begin that must be zero
  int64_t schedule, expert_block, macro_block, communication, compute, bad, histogram;
  int64_t bytes;

  // Depends on the shape, its ring included, but not on the minibatch: arrays are sized before that is chosen.
  MOK_FN explicit WorkspaceLayout(Shape s) {
    s.minibatch_rows = kRowBlock;
    bytes = 0;
    take(sizeof(WorkspaceHeader));
    meeting = take(sizeof(Meeting));
    const int64_t pieces = max_macrobatches(s) + s.local_experts;
    counters = take(4 * (kBlockFamilies * (max_rows(s) / kRowBlock) + kPieceFamilies * pieces + kColumnBands));
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

// Of a rank's call. Where all ranks of a call are here, the arena follows the workspace.
MOK_FN int64_t workspace_bytes(const Shape& s, int64_t ranks_here) {
  return WorkspaceLayout(s).bytes + (ranks_here == s.ranks ? local_arena(s).bytes : 0);
}

}  // namespace mok::cuda
