// The arena: the part of a rank's memory that its peers read and write. Same layout on every rank; byte offsets only,
// since addresses differ. Through which words ranks meet is in meeting.h: those are not of an arena.
#pragma once

#include "moe/shape.h"

namespace mok {

// What depends on the shape of a call.
struct RowsLayout {
  int64_t x;             // [T, H], the source of dispatch
  int64_t dy;            // [T, H], the source of reverse-combine
  int64_t slots;         // [T * K, H], where rows come back: y rows in the forward, dx rows in the backward
  int64_t weights;       // [T * K] f32, router weights
  int64_t router_grads;  // [T * K] f32, where their gradients come back
  int64_t bytes;         // of the whole

  static constexpr int64_t kAlignment = 1024;

  // `item` is the size of an element of x in bytes. Without `staged` there is no room for x and dy, which a rank that
  // is alone reads where they are.
  MOK_FN RowsLayout(const Shape& s, int64_t item, bool staged = true) {
    bytes = 0;
    x = take(staged ? s.tokens * s.hidden_size * item : 0);
    dy = take(staged ? s.tokens * s.hidden_size * item : 0);
    slots = take(s.slots() * s.hidden_size * item);
    weights = take(s.slots() * 4);
    router_grads = take(s.slots() * 4);
  }

 protected:
  MOK_FN int64_t take(int64_t size) {
    const int64_t at = bytes;
    bytes += round_up(size, kAlignment);
    return at;
  }
};

// Of ranks that share a process, or of one alone: made for each call, or each shape.
struct ArenaLayout : RowsLayout {
  int64_t expert_ids;  // [T * K] int32, clean (see clean_expert_ids)

  MOK_FN ArenaLayout(const Shape& s, int64_t item) : RowsLayout(s, item) { expert_ids = take(s.slots() * 4); }
};

// The smallest of 4, 5, 6 and 7 times powers of two that is not below n; at most a quarter more.
MOK_FN constexpr int64_t round_up_to_class(int64_t n) {
  int64_t step = 1;
  while (n > 8 * step) step *= 2;
  return round_up(n, step);
}

// Arenas of several GPUs come in few sizes, and a call uses that of its class and no other: so all ranks agree on the
// arena, whatever each has called before.
struct ArenaClass {
  int64_t ids;   // of all ranks, for which each of the two buffers has room
  int64_t rows;  // bytes for what depends on the shape

  MOK_FN ArenaClass(const Shape& s, int64_t item)
      : ids(round_up_to_class(s.ranks * s.slots())), rows(round_up_to_class(RowsLayout(s, item).bytes)) {}
  bool operator==(const ArenaClass&) const = default;
};

// The arena of several GPUs. Every rank pushes its clean expert ids into the arenas of all: [2][ranks * T * K] int32,
// by the parity of the call. No completion implies that a rank has read them, so they must not lie where the next call,
// of another shape, has rows.
struct SharedArenaLayout {
  int64_t expert_ids[2];  // by the call's parity
  int64_t rows_begin;     // of the RowsLayout
  int64_t bytes;

  MOK_FN SharedArenaLayout(int64_t ids, int64_t rows) {
    const int64_t buffer = round_up(ids * 4, RowsLayout::kAlignment);
    expert_ids[0] = 0;
    expert_ids[1] = buffer;
    rows_begin = 2 * buffer;
    bytes = rows_begin + round_up(rows, RowsLayout::kAlignment);
  }
  MOK_FN explicit SharedArenaLayout(const ArenaClass& c) : SharedArenaLayout(c.ids, c.rows) {}
};

}  // namespace mok
