// What is proven of the protocol between calls: which calls the ranks of a group make one after another, and in which
// way the protocol may be wrong.
#pragma once

#include <iterator>
#include <string>
#include <vector>

#include "moe/program.h"

namespace mok::verify {

// One call site with its shape and routing. Every rank has one expert.
struct CallSite {
  Direction direction;
  Shape shape;               // of rank 0
  std::vector<int32_t> ids;  // [ranks, tokens, top_k], clean
};

struct Sequence {
  int32_t ranks;
  int32_t blocks;    // CTAs of the kernel that schedules a rank's call
  int32_t bands;     // of columns, in the forward; the backward's rows come back whole
  int32_t failures;  // that may happen in all
  std::vector<CallSite> sites;
  std::vector<std::vector<std::vector<int32_t>>> programs;  // [ranks, streams]: sites, in the order of their calls
};

// Ways to be wrong. The names are in the same order.
enum class Flaw : int32_t {
  none,
  // Which memory is used when.
  ids_in_place_by_shape,   // ids stay with their rank, and lie behind what depends on the shape
  ids_pushed_by_shape,     // they are pushed to such a place
  one_buffer_of_ids,       // for all calls
  enter_before_ids,        // a rank says that it has entered before its ids are pushed
  enter_before_staging,    // or before its rows are in its arena
  meet_previous_call,      // a peer in the call before is good enough
  meet_not_all,            // one peer is not waited for
  backward_does_not_meet,  // as the forward has
  notify_before_pulled,    // a source hears that its rows are back while some are still read
  notify_before_pushed,    // or written
  leave_before_last_band,  // of columns has come back
  settle_when_met,         // what has arrived before a call is noted after peers may have added to it
  never_settle,            // or not at all
  // Are all in the same call?
  one_hash,          // for all calls
  hash_after_entry,  // a rank says that it has entered before it says which call
  hash_not_compared,
  enter_by_class,  // the words through which ranks meet are a part of the arena
  // Does everybody hear of a failure?
  cancel_own_rank,  // only
  cancel_ignored_in_meet,
  cancel_ignored_in_barrier,
  cancel_ignored_in_tasks,
  cancel_ignored_at_entry,
  cancel_forgotten,  // when the call has ended
  cancel_by_class,   // the word is a part of the arena
  no_abort,          // after an error of the host
  host_not_told,     // of what a peer has cancelled
  // Calls of one rank at the same time.
  busy_ignored,
  busy_not_atomic,         // the word is read, and then written
  busy_seen_by_one_block,  // of the several that fill the arena
};
inline constexpr const char* kFlawNames[] = {"none",
                                             "ids_in_place_by_shape",
                                             "ids_pushed_by_shape",
                                             "one_buffer_of_ids",
                                             "enter_before_ids",
                                             "enter_before_staging",
                                             "meet_previous_call",
                                             "meet_not_all",
                                             "backward_does_not_meet",
                                             "notify_before_pulled",
                                             "notify_before_pushed",
                                             "leave_before_last_band",
                                             "settle_when_met",
                                             "never_settle",
                                             "one_hash",
                                             "hash_after_entry",
                                             "hash_not_compared",
                                             "enter_by_class",
                                             "cancel_own_rank",
                                             "cancel_ignored_in_meet",
                                             "cancel_ignored_in_barrier",
                                             "cancel_ignored_in_tasks",
                                             "cancel_ignored_at_entry",
                                             "cancel_forgotten",
                                             "cancel_by_class",
                                             "no_abort",
                                             "host_not_told",
                                             "busy_ignored",
                                             "busy_not_atomic",
                                             "busy_seen_by_one_block"};
static_assert(std::size(kFlawNames) == static_cast<size_t>(Flaw::busy_seen_by_one_block) + 1);

}  // namespace mok::verify
