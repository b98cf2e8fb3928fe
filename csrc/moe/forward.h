// The forward algorithm. Per macrobatch, last to first: pull rows (dispatch), gate and up tiles with SwiGLU, down tiles
// that push each row into its source's slot (combine). Every rank reduces its tokens over their slots, one band of
// columns after the other: the last macrobatch computes the down tiles of one while tokens are reduced over another.
#pragma once

#include "moe/program.h"

namespace mok {

// Pulls run ahead as far as the ring allows; sources hear of finished blocks when nothing is left to pull.
MOK_FN void forward_communication(const Plan& p, TaskList& list) {
  for (int32_t m = p.macrobatches - 1; m >= 0; --m) {
    for (int32_t i = 0; i < minibatches(p, m); ++i) list.add_pulls(TaskKind::pull_rows, m, minibatch(p, m, i));
  }
  for (int32_t band = 0; band < down_bands(p.tiles).count(); ++band) {
    for (int32_t m = p.macrobatches - 1; m >= 0; --m) list.add_of_band(TaskKind::notify, m, macrobatch(p, m), band);
    list.add_of_band(TaskKind::reduce, 0, {0, p.token_blocks}, band);
  }
}

// A minibatch's down tiles come after the next one's gate and up tiles, so that they do not wait for tiles that other
// workers have just begun; except where the ring is so small that the next one needs the place of their hidden rows.
// Nothing needs the places of macrobatch 0: its later bands of columns come at the end.
MOK_FN void forward_compute(const Plan& p, TaskList& list) {
  Range owed;
  int32_t owed_macrobatch = 0;
  const auto pay = [&] {
    list.add(TaskKind::down, owed_macrobatch, owed,
             owed_macrobatch > 0 ? Range{0, p.tiles.down} : down_bands(p.tiles).of(0));
    owed = {};
  };
  for (int32_t m = p.macrobatches - 1; m >= 0; --m) {
    for (int32_t i = 0; i < minibatches(p, m); ++i) {
      const Range next = minibatch(p, m, i);
      if (owed.overlaps(next.begin + p.ring_blocks, next.end + p.ring_blocks)) pay();
      list.add(TaskKind::gate_up, m, next, p.tiles.gate_up);
      pay();
      owed = next;
      owed_macrobatch = m;
    }
  }
  pay();
  for (int32_t band = 1; band < down_bands(p.tiles).count(); ++band) {
    list.add(TaskKind::down, 0, macrobatch(p, 0), down_bands(p.tiles).of(band));
  }
}

// All bands' down tiles of a block.
MOK_FN void wait_for_pushes(Task& t, const Plan& p, const CounterMap& counters, int32_t block) {
  for (int32_t band = 0; band < kColumnBands; ++band) {
    t.wait_for(counters.pushed(block, band), down_bands(p.tiles).of(band).size());
  }
}

// See write_task.
MOK_FN void write_forward_task(const Plan& p, const Segment& s, int64_t ticket, Task& t) {
  const int64_t offset = ticket - s.first_ticket;
  const CounterMap counters(p);
  begin_task(t, s);
  // The block that held this one's place in the ring, if there was one.
  const auto before = [&] { return t.block + p.ring_blocks; };
  switch (s.kind) {
    case TaskKind::pull_rows:
      place(t, p, rotated(s, p, offset));
      if (before() < p.blocks()) t.wait_for(counters.of(Counter::gate_up_done, before()), p.tiles.gate_up);
      t.signal(counters.of(Counter::rows_pulled, t.block));
      break;
    case TaskKind::gate_up:
      place(t, p, weights_outer(s, p, offset));
      t.wait_for(counters.of(Counter::rows_pulled, t.block), kPullsPerBlock);
      if (before() < p.blocks()) wait_for_pushes(t, p, counters, before());
      t.signal(counters.of(Counter::gate_up_done, t.block));
      break;
    case TaskKind::down:
      place(t, p, weights_outer(s, p, offset));
      t.wait_for(counters.of(Counter::gate_up_done, t.block), p.tiles.gate_up);
      t.signal(counters.pushed(t.block, down_bands(p.tiles).holding(t.part)));
      break;
    case TaskKind::notify:
      place(t, p, item_outer(s, offset));
      t.wait_for(counters.pushed(t.block, t.part), down_bands(p.tiles).of(t.part).size());
      break;
    default:  // reduce
      place(t, p, item_outer(s, offset));
      t.wait_for(counters.arrived(t.part), p.valid_slots);
      break;
  }
}

}  // namespace mok
