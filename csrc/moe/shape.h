// Shapes of one call on one rank, the constants of the schedule, and how many rows and macrobatches can arise.
// Everything here is known before any token has been routed.
#pragma once

#include "moe/base.h"

namespace mok {

inline constexpr int64_t kRowBlock = 128;    // rows of one expert are padded to, counted and computed in such blocks
inline constexpr int64_t kPullRows = 8;      // rows that one pull task fetches
inline constexpr int64_t kReduceTokens = 8;  // tokens that one reduce task finishes
inline constexpr int32_t kPullsPerBlock = kRowBlock / kPullRows;

// What the forward keeps of macrobatch 0 for the backward.
enum class Save : int32_t { nothing = 0, pre_activations = 1, pre_activations_and_rows = 2 };

struct Shape {
  int64_t ranks;              // EP
  int64_t rank;               // this one, in [0, ranks)
  int64_t tokens;             // T, of each rank
  int64_t top_k;              // K
  int64_t hidden_size;        // H
  int64_t intermediate_size;  // I
  int64_t local_experts;      // E / EP
  int64_t ring_rows;          // a multiple of kRowBlock
  int64_t minibatch_rows;     // a multiple of kRowBlock

  MOK_FN int64_t slots() const { return tokens * top_k; }  // of one rank
  MOK_FN int64_t experts() const { return local_experts * ranks; }
};

// Rows, padding included, that can arrive at one rank at most: every slot of every rank, and each expert that has
// a row wastes up to kRowBlock - 1.
MOK_FN int64_t max_rows(const Shape& s) {
  const int64_t n = s.ranks * s.slots();
  return (n + smaller(s.local_experts, n) * (kRowBlock - 1)) / kRowBlock * kRowBlock;
}

MOK_FN int64_t default_ring_rows(const Shape& s) {
  const int64_t bound = max_rows(s);
  if (s.ranks == 1) return bound;
  const int64_t n = s.ranks * s.slots();
  const int64_t usual = ceil_div(5 * s.slots(), 4) + smaller(s.local_experts, n) * kRowBlock;
  return smaller(bound, round_up(usual, kRowBlock));
}

// A macrobatch that is not the last has at least this many rows: it is cut in its last quarter.
MOK_FN int64_t shortest_macrobatch(int64_t ring_rows) { return round_up(ring_rows - ring_rows / 4, kRowBlock); }

MOK_FN int64_t max_macrobatches(const Shape& s) {
  return larger<int64_t>(1, ceil_div(max_rows(s), shortest_macrobatch(s.ring_rows)));
}

}  // namespace mok
