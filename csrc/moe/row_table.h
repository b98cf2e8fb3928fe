// The row table: which slot of which rank each row of this rank comes from. One table serves dispatch, combine and
// both of their reversals. Canonical order: local expert, source rank, slot; each expert padded to a row block.
// This is the definition, written for one thread; a GPU builds the same table in parallel.
#pragma once

#include "moe/shape.h"

namespace mok {

struct RowSource {
  int32_t rank;  // -1: padding
  int32_t slot;
};

// Makes a rank's expert ids safe to count. A token with any id outside [-1, experts) is bad: all its slots become -1.
// Returns the number of bad tokens. `bad` is [tokens], `clean` is [tokens * top_k].
MOK_FN int32_t clean_expert_ids(const Shape& s, const int32_t* ids, int32_t* clean, uint8_t* bad) {
  int32_t bad_tokens = 0;
  for (int64_t t = 0; t < s.tokens; ++t) {
    bool is_bad = false;
    for (int64_t k = 0; k < s.top_k; ++k) {
      const int32_t id = ids[t * s.top_k + k];
      is_bad = is_bad || id < -1 || id >= s.experts();
    }
    for (int64_t k = 0; k < s.top_k; ++k) clean[t * s.top_k + k] = is_bad ? -1 : ids[t * s.top_k + k];
    bad[t] = is_bad;
    bad_tokens += is_bad;
  }
  return bad_tokens;
}

// The first row block of each expert, and the end: `expert_block` [experts + 1].
MOK_FN void place_experts(int32_t experts, const int32_t* expert_rows, int32_t* expert_block) {
  int32_t block = 0;
  for (int32_t e = 0; e < experts; ++e) {
    expert_block[e] = block;
    block += static_cast<int32_t>(ceil_div(expert_rows[e], kRowBlock));
  }
  expert_block[experts] = block;
}

// ids(rank, slot): the clean expert id of any rank's slot. Writes `expert_rows` [local_experts], rows without padding,
// and `expert_block` [local_experts + 1], the first row block of each expert.
template <class Ids>
MOK_FN void count_rows(const Shape& s, const Ids& ids, int32_t* expert_rows, int32_t* expert_block) {
  const int64_t first = s.rank * s.local_experts;
  for (int64_t e = 0; e < s.local_experts; ++e) expert_rows[e] = 0;
  for (int64_t r = 0; r < s.ranks; ++r) {
    for (int64_t slot = 0; slot < s.slots(); ++slot) {
      const int64_t e = ids(r, slot) - first;
      if (e >= 0 && e < s.local_experts) ++expert_rows[e];
    }
  }
  place_experts(static_cast<int32_t>(s.local_experts), expert_rows, expert_block);
}

// Fills `rows` [expert_block[local_experts] * kRowBlock]; `next` [local_experts] is scratch.
template <class Ids>
MOK_FN void fill_row_table(const Shape& s, const Ids& ids, const int32_t* expert_rows, const int32_t* expert_block,
                           int64_t* next, RowSource* rows) {
  const int64_t first = s.rank * s.local_experts;
  for (int64_t e = 0; e < s.local_experts; ++e) {
    next[e] = expert_block[e] * kRowBlock;
    for (int64_t row = next[e] + expert_rows[e]; row < expert_block[e + 1] * kRowBlock; ++row) rows[row] = {-1, -1};
  }
  for (int64_t r = 0; r < s.ranks; ++r) {
    for (int64_t slot = 0; slot < s.slots(); ++slot) {
      const int64_t e = ids(r, slot) - first;
      if (e >= 0 && e < s.local_experts) {
        rows[next[e]++] = {static_cast<int32_t>(r), static_cast<int32_t>(slot)};
      }
    }
  }
}

}  // namespace mok
