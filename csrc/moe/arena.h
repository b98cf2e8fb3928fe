// The arena: the part of a rank's memory that its peers read and write. Same layout on every rank; byte offsets only,
// since addresses differ.
#pragma once

#include "moe/shape.h"

namespace mok {

struct ArenaLayout {
  int64_t x;             // [T, H], the source of dispatch
  int64_t dy;            // [T, H], the source of reverse-combine
  int64_t slots;         // [T * K, H], where rows come back: y rows in the forward, dx rows in the backward
  int64_t weights;       // [T * K] f32, router weights
  int64_t router_grads;  // [T * K] f32, where their gradients come back
  int64_t expert_ids;    // [T * K] int32, clean (see clean_expert_ids)
  int64_t bytes;         // of the whole

  static constexpr int64_t kAlignment = 1024;

  // `item` is the size of an element of x in bytes. Without `staged` there is no room for x and dy, which a rank that
  // is alone reads where they are.
  MOK_FN ArenaLayout(const Shape& s, int64_t item, bool staged = true) {
    bytes = 0;
    x = take(staged ? s.tokens * s.hidden_size * item : 0);
    dy = take(staged ? s.tokens * s.hidden_size * item : 0);
    slots = take(s.slots() * s.hidden_size * item);
    weights = take(s.slots() * 4);
    router_grads = take(s.slots() * 4);
    expert_ids = take(s.slots() * 4);
  }

 private:
  MOK_FN int64_t take(int64_t size) {
    const int64_t at = bytes;
    bytes += round_up(size, kAlignment);
    return at;
  }
};

}  // namespace mok
