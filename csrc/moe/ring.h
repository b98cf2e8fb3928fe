// How rows flow through a ring of fixed size. Row block b always lives in ring block b mod ring_blocks, so the block
// that held its place before is b + ring_blocks in the forward (which visits macrobatches last to first) and
// b - ring_blocks in the backward. Macrobatch 0 begins at block 0: it ends up in place, for the backward to find.
#pragma once

#include "moe/shape.h"

namespace mok {

// Cuts the row blocks of all experts into macrobatches: at most ring_blocks each, ended at the last expert boundary
// within the last quarter, else where the ring is full. Writes `macro_block` [count + 1] and returns count >= 1.
MOK_FN int32_t cut_macrobatches(const int32_t* expert_block, int32_t experts, int32_t ring_blocks,
                                int32_t* macro_block) {
  const int32_t total = expert_block[experts];
  const int32_t shortest = static_cast<int32_t>(shortest_macrobatch(ring_blocks * kRowBlock) / kRowBlock);
  int32_t count = 0, begin = 0;
  macro_block[0] = 0;
  while (total - begin > ring_blocks) {
    int32_t end = begin + ring_blocks;
    const int32_t boundary = expert_block[last_not_above(expert_block, experts + 1, end)];
    if (boundary >= begin + shortest) end = boundary;
    macro_block[++count] = begin = end;
  }
  macro_block[++count] = total;
  return count;
}

}  // namespace mok
