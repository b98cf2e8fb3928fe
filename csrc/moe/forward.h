// The forward algorithm. Per macrobatch, last to first: pull rows (dispatch), gate and up tiles with SwiGLU, down tiles
// that push each row into its source's slot (combine). Then every rank reduces its tokens over their slots.
#pragma once

#include "moe/program.h"

namespace mok {

// Pulls run ahead as far as the ring allows; sources hear of finished blocks when nothing is left to pull.
MOK_FN void forward_communication(const Plan& p, TaskList& list) {
  for (int32_t m = p.macrobatches - 1; m >= 0; --m) {
    for (int32_t i = 0; i < minibatches(p, m); ++i)
      list.add(TaskKind::pull_rows, m, minibatch(p, m, i), kPullsPerBlock);
  }
  for (int32_t m = p.macrobatches - 1; m >= 0; --m) {
    list.add(TaskKind::notify, m, {p.macro_block[m], p.macro_block[m + 1]}, 1);
  }
}

// A minibatch's down tiles come after the next one's gate and up tiles, so that they do not wait for tiles that other
// workers have just begun; except where the ring is so small that the next one needs the place of their hidden rows.
MOK_FN void forward_compute(const Plan& p, TaskList& list) {
  Range owed;
  int32_t owed_macrobatch = 0;
  const auto pay = [&] {
    list.add(TaskKind::down, owed_macrobatch, owed, p.tiles.down);
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
  list.add(TaskKind::reduce, 0, {0, p.token_blocks}, 1);
}

// Task number `ticket` of a list, written where it is to lie: on a device its arrays, indexed at run time, must not be
// in registers.
MOK_FN void write_forward_task(const Plan& p, const TaskList& list, int64_t ticket, Task& t) {
  const Segment& s = list.segment_of(ticket);
  const int64_t offset = ticket - s.first_ticket;
  const CounterMap counters(p);
  begin_task(t, s);
  // Waits until the block that held this one's place in the ring has been consumed, if there was one.
  const auto wait_for_place = [&](Counter consumed, int32_t tiles) {
    const int32_t before = t.block + p.ring_blocks;
    if (before < p.blocks()) t.wait_for(counters.of(consumed, before), tiles);
  };
  switch (s.kind) {
    case TaskKind::pull_rows:
      place(t, p, rotated(s, p, offset));
      wait_for_place(Counter::gate_up_done, p.tiles.gate_up);
      t.signal(counters.of(Counter::rows_pulled, t.block));
      break;
    case TaskKind::gate_up:
      place(t, p, weights_outer(s, p, offset));
      t.wait_for(counters.of(Counter::rows_pulled, t.block), kPullsPerBlock);
      wait_for_place(Counter::pushed, p.tiles.down);
      t.signal(counters.of(Counter::gate_up_done, t.block));
      break;
    case TaskKind::down:
      place(t, p, weights_outer(s, p, offset));
      t.wait_for(counters.of(Counter::gate_up_done, t.block), p.tiles.gate_up);
      t.signal(counters.of(Counter::pushed, t.block));
      break;
    case TaskKind::notify:
      place(t, p, item_outer(s, offset));
      t.wait_for(counters.of(Counter::pushed, t.block), p.tiles.down);
      break;
    default:  // reduce
      place(t, p, item_outer(s, offset));
      t.wait_for(counters.arrived(), p.valid_slots);
      break;
  }
}

MOK_FN Task forward_task(const Plan& p, const TaskList& list, int64_t ticket) {
  Task t;
  write_forward_task(p, list, ticket, t);
  return t;
}

}  // namespace mok
