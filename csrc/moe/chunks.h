// How the row table is built in parallel. All ranks' slots, in canonical order, are cut into chunks, and each chunk
// into shares of warps. Rows are counted by expert and chunk; the counts of the chunks before one tell where its rows
// begin. So any worker can count and write any chunk, in any order, and the table depends neither on that nor on how
// many chunks there are.
#pragma once

#include "moe/row_table.h"

namespace mok {

// So many that each has `items_each` items of work, but no more than `most`.
MOK_FN int32_t chunks_for(int64_t items, int64_t items_each, int32_t most) {
  return static_cast<int32_t>(larger<int64_t>(1, smaller<int64_t>(most, ceil_div(items, items_each))));
}

// Slots of all ranks in one line: slot s of rank r is r * slots() + s.
struct SlotRange {
  int64_t begin, end;
};

// What one of several shares has of all slots: whole groups of `lanes`, which visit neighbouring slots. The last shares
// may have less or nothing. Shares of a chunk are neighbours.
MOK_FN SlotRange slots_of_share(const Shape& s, int32_t share, int32_t shares, int32_t lanes) {
  const int64_t total = s.ranks * s.slots(), each = round_up(ceil_div(total, shares), lanes);
  return {smaller(share * each, total), smaller((share + 1) * each, total)};
}

// Rows of one expert in all chunks, and in those before one.
struct ChunkedRows {
  int32_t total, before;
};

// What one of several lanes adds up. rows(chunk): the expert's rows in that chunk.
template <class Rows>
MOK_FN ChunkedRows add_chunks(const Rows& rows, int32_t chunk, int32_t chunks, int32_t lane, int32_t lanes) {
  ChunkedRows sum{0, 0};
  for (int32_t other = lane; other < chunks; other += lanes) {
    const int32_t count = rows(other);
    sum.total += count;
    if (other < chunk) sum.before += count;
  }
  return sum;
}

// Turns one expert's rows in each share of a chunk, `stride` apart, into those before the share.
MOK_FN void place_shares(int32_t before, int32_t shares, int32_t stride, int32_t* rows) {
  for (int32_t i = 0; i < shares; ++i) {
    const int32_t count = rows[i * stride];
    rows[i * stride] = before;
    before += count;
  }
}

}  // namespace mok
