// The backward algorithm. Per macrobatch, first to last: pull dy rows and x rows; recompute pre-activations where the
// forward's are not kept (replay); hidden_grad tiles (dy wo^T, then back through SwiGLU, with the router gradient as a
// row dot); row_grad tiles (dgate wi_0^T + dup wi_1^T) that push each row into its source's slot; weight gradients.
// While those of the last macrobatch are computed, every rank reduces dx over its tokens' slots.
#pragma once

#include "moe/program.h"

namespace mok {

// Pre-activations of macrobatch 0 are a residual of the forward unless nothing was saved; the others never are.
MOK_FN bool replays(const Plan& p, int32_t m) { return m > 0 || p.save == Save::nothing; }
MOK_FN bool pulls_rows(const Plan& p, int32_t m) { return m > 0 || p.save != Save::pre_activations_and_rows; }
// Where x is needed for weight gradients only, nothing that a row's source hears of depends on its pull.
MOK_FN bool pulls_rows_aside(const Plan& p, int32_t m) { return pulls_rows(p, m) && !replays(p, m); }

MOK_FN void backward_communication(const Plan& p, TaskList& list) {
  for (int32_t m = 0; m < p.macrobatches; ++m) {
    for (int32_t i = 0; i < minibatches(p, m); ++i) {
      const Range rows = minibatch(p, m, i);
      if (replays(p, m)) list.add_pulls(TaskKind::pull_rows, m, rows);
      list.add_pulls(TaskKind::pull_grads, m, rows);
    }
    if (pulls_rows_aside(p, m)) {  // after all dy
      list.add_pulls(TaskKind::pull_rows, m, macrobatch(p, m));
    }
  }
  for (int32_t m = 0; m < p.macrobatches; ++m) list.add(TaskKind::notify, m, macrobatch(p, m), 1);
  for (int32_t band = 0; band < row_grad_bands(p.tiles).count(); ++band) {
    list.add_of_band(TaskKind::reduce, 0, {0, p.token_blocks}, band);
  }
}

// Within a macrobatch each stage runs one minibatch behind the stage that feeds it.
MOK_FN void backward_compute(const Plan& p, TaskList& list) {
  for (int32_t m = 0; m < p.macrobatches; ++m) {
    const int32_t count = minibatches(p, m);
    const auto stage = [&](TaskKind kind, int32_t index, int32_t tiles) {
      if (index >= 0 && index < count) list.add(kind, m, minibatch(p, m, index), tiles);
    };
    for (int32_t i = 0; i < count + 2; ++i) {
      if (replays(p, m)) stage(TaskKind::gate_up, i, p.tiles.gate_up);
      stage(TaskKind::hidden_grad, i - 1, p.tiles.hidden_grad);
      stage(TaskKind::row_grad, i - 2, p.tiles.row_grad);
    }
    list.add(TaskKind::weight_grad, m, {p.first_expert(m), p.end_expert(m)}, p.tiles.weight_grad);
  }
}

// The last macrobatch up to m at whose begin an expert was continued, so that the scratch of the straddling expert was
// in use; or 0. It may be several macrobatches back: cuts at the boundary of two experts need no scratch.
MOK_FN int32_t last_continued(const Plan& p, int32_t m) {
  while (m > 0 && !p.begins_earlier(m, p.first_expert(m))) --m;
  return m;
}

// The piece of `expert` in the task's macrobatch: all its rows in the ring, its earlier part accumulated, and the
// scratch of the straddling expert free if this piece is to fill it.
MOK_FN void weight_grad_waits(const Plan& p, const CounterMap& counters, Task& t) {
  const int32_t m = t.macrobatch, piece = p.piece(m, t.expert);
  t.wait_for(counters.of(Counter::piece_hidden_grad, piece), t.blocks * p.tiles.hidden_grad);
  if (pulls_rows_aside(p, m)) {
    t.wait_for(counters.of(Counter::piece_rows_pulled, piece), t.blocks * kPullsPerBlock);
  }
  if (p.begins_earlier(m, t.expert)) {
    t.wait_for(counters.of(Counter::piece_weight_grad, piece - 1), p.tiles.weight_grad);
  } else if (p.ends_later(m, t.expert)) {
    const int32_t last = last_continued(p, m);
    if (last > 0)
      t.wait_for(counters.of(Counter::piece_weight_grad, p.piece(last, p.first_expert(last))), p.tiles.weight_grad);
  }
}

// See write_task.
MOK_FN void write_backward_task(const Plan& p, const Segment& s, int64_t ticket, Task& t) {
  const int64_t offset = ticket - s.first_ticket;
  const CounterMap counters(p);
  begin_task(t, s);
  // The block that held this one's place in the ring, or -1. Weight gradients are the last to read a pulled row.
  const auto before = [&] { return t.block - p.ring_blocks; };
  const auto wait_for_pull_place = [&] {
    if (before() < 0) return;
    t.wait_for(counters.of(Counter::piece_weight_grad, p.piece_of(before())), p.tiles.weight_grad);
  };
  switch (s.kind) {
    case TaskKind::pull_rows:
      place(t, p, rotated(s, p, offset));
      if (before() >= 0 && pulls_rows(p, p.macrobatch_of(before()))) wait_for_pull_place();
      t.signal(counters.of(Counter::rows_pulled, t.block));
      if (pulls_rows_aside(p, t.macrobatch)) {
        t.signal(counters.of(Counter::piece_rows_pulled, p.piece(t.macrobatch, t.expert)));
      }
      break;
    case TaskKind::pull_grads:
      place(t, p, rotated(s, p, offset));
      wait_for_pull_place();
      t.signal(counters.of(Counter::grads_pulled, t.block));
      break;
    case TaskKind::gate_up:  // its place is free when the pulled rows' place is
      place(t, p, weights_outer(s, p, offset));
      t.wait_for(counters.of(Counter::rows_pulled, t.block), kPullsPerBlock);
      t.signal(counters.of(Counter::gate_up_done, t.block));
      break;
    case TaskKind::hidden_grad:
      place(t, p, weights_outer(s, p, offset));
      t.wait_for(counters.of(Counter::grads_pulled, t.block), kPullsPerBlock);
      if (replays(p, t.macrobatch)) t.wait_for(counters.of(Counter::gate_up_done, t.block), p.tiles.gate_up);
      if (before() >= 0) t.wait_for(counters.pushed(before(), 0), p.tiles.row_grad);
      t.signal(counters.of(Counter::hidden_grad_done, t.block));
      t.signal(counters.of(Counter::piece_hidden_grad, p.piece(t.macrobatch, t.expert)));
      break;
    case TaskKind::row_grad:
      place(t, p, weights_outer(s, p, offset));
      t.wait_for(counters.of(Counter::hidden_grad_done, t.block), p.tiles.hidden_grad);
      t.signal(counters.pushed(t.block, 0));
      break;
    case TaskKind::weight_grad: {
      const ItemPart at = item_outer(s, offset);
      t.expert = at.item;
      t.part = at.part;
      t.block = p.piece_begin(t.macrobatch, t.expert);
      t.blocks = p.piece_blocks(t.macrobatch, t.expert);
      weight_grad_waits(p, counters, t);
      t.signal(counters.of(Counter::piece_weight_grad, p.piece(t.macrobatch, t.expert)));
      break;
    }
    case TaskKind::notify:
      place(t, p, item_outer(s, offset));
      t.wait_for(counters.pushed(t.block, 0), p.tiles.row_grad);
      // A source that has its rows back may leave the call, and x in its arena with it.
      if (pulls_rows_aside(p, t.macrobatch)) t.wait_for(counters.of(Counter::rows_pulled, t.block), kPullsPerBlock);
      break;
    default:  // reduce
      place(t, p, item_outer(s, offset));
      t.wait_for(counters.arrived(0), p.valid_slots);
      break;
  }
}

}  // namespace mok
