// Which memory each task reads and writes, for whoever proves that the waits of the task program order every two tasks
// that conflict. An executor may touch less than is declared here, never more. Left out is what no task of a call
// writes: weights of the experts, the row table, what the backward is given from the forward, and expert ids, which are
// a matter between calls (verify/footprint.h).
#pragma once

#include "moe/backward.h"
#include "moe/forward.h"

namespace mok {

// What a region lies in. Its rows are rows of the ring, unless said otherwise.
enum class Storage : int32_t {
  rows,             // pulled x
  pre_activations,  // columns: gate_up tiles
  hidden,           // columns: gate_up tiles in the forward, hidden_grad tiles in the backward
  grads,            // pulled dy
  row_weights,      // pulled router weights
  gate_up_grads,    // columns: hidden_grad tiles
  router_parts,     // columns: hidden_grad tiles
  straddle,         // one row; columns: weight_grad tiles
  expert_grads,     // rows: experts; columns: weight_grad tiles
  out,              // rows: tokens; columns: down or row_grad tiles. y, or dx and the gradients of router weights
  // The arena, which peers use too:
  x,             // rows: tokens
  dy,            // rows: tokens
  weights,       // rows: slots
  slots,         // rows: slots; columns: down or row_grad tiles
  router_grads,  // rows: slots
};
inline constexpr int32_t kStorages = static_cast<int32_t>(Storage::router_grads) + 1;
inline constexpr const char* kStorageNames[] = {
    "rows",         "pre_activations", "hidden",       "grads", "row_weights", "gate_up_grads",
    "router_parts", "straddle",        "expert_grads", "out",   "x",           "dy",
    "weights",      "slots",           "router_grads"};
static_assert(std::size(kStorageNames) == kStorages);

struct Region {
  Storage storage;
  int32_t rank;  // whose memory
  bool write;
  int64_t begin, end;  // rows
  Range columns;       // counted in tiles of the kind of task that writes them; [0, 1) where rows are written whole
  // What a write leaves there and what a read expects: the row block, the piece (straddle), else 0.
  int32_t content;
};

// Visits the regions of one rank's tasks. `rows` is the rank's row table and `ids` are the clean expert ids of its own
// slots.
template <class Visit>
class Regions {
 public:
  MOK_FN Regions(Direction direction, const Shape& shape, const Plan& plan, const RowSource* rows, const int32_t* ids,
                 Visit visit)
      : forward_(direction == Direction::forward), shape_(shape), plan_(plan), rows_(rows), ids_(ids), visit_(visit) {}

  MOK_FN void of_task(const Task& t) {
    switch (t.kind) {
      case TaskKind::pull_rows:
        return pull(t, Storage::x, Storage::rows);
      case TaskKind::pull_grads:
        return pull(t, Storage::dy, Storage::grads);
      case TaskKind::notify:
        return;  // only counts
      case TaskKind::gate_up:
        return gate_up(t);
      case TaskKind::down:
        read_block(Storage::hidden, t.block, plan_.tiles.gate_up);
        return push(t, Storage::slots, t.part);
      case TaskKind::hidden_grad:
        return hidden_grad(t);
      case TaskKind::row_grad:
        return row_grad(t);
      case TaskKind::weight_grad:
        return weight_grad(t);
      case TaskKind::reduce:
        return reduce(t);
    }
  }

  // The rank leaves the call. Its results are read, among them what the forward saves of macrobatch 0, and the arena is
  // the next call's to write.
  MOK_FN void at_exit() {
    const int64_t slots = shape_.slots();
    visit_(Region{Storage::out, plan_.rank, false, 0, shape_.tokens, {0, slot_tiles()}, 0});
    for (int32_t block = 0; forward_ && block < plan_.macro_block[1]; ++block) {
      if (plan_.save != Save::nothing) read_block(Storage::pre_activations, block, plan_.tiles.gate_up);
      if (plan_.save == Save::pre_activations_and_rows) read_block(Storage::rows, block);
    }
    for (Storage token_rows : {Storage::x, Storage::dy}) {
      visit_(Region{token_rows, plan_.rank, true, 0, shape_.tokens, {0, 1}, 0});
    }
    for (Storage slot_rows : {Storage::weights, Storage::router_grads}) {
      visit_(Region{slot_rows, plan_.rank, true, 0, slots, {0, 1}, 0});
    }
    visit_(Region{Storage::slots, plan_.rank, true, 0, slots, {0, slot_tiles()}, 0});
  }

 private:
  MOK_FN int32_t slot_tiles() const { return forward_ ? plan_.tiles.down : plan_.tiles.row_grad; }

  MOK_FN void ring(Storage storage, bool write, int32_t block, Range rows, Range columns) {
    const int64_t first = plan_.ring_block(block) * kRowBlock;
    visit_(Region{storage, plan_.rank, write, first + rows.begin, first + rows.end, columns, block});
  }
  MOK_FN void read_block(Storage storage, int32_t block, int32_t tiles = 1) {
    ring(storage, false, block, {0, kRowBlock}, {0, tiles});
  }
  MOK_FN void write_tile(Storage storage, const Task& t) {
    ring(storage, true, t.block, {0, kRowBlock}, {t.part, t.part + 1});
  }

  // Padding rows of the ring are written too, as an executor may zero them.
  MOK_FN void pull(const Task& t, Storage from, Storage to) {
    const Range rows = pulled_rows(t);
    for (int32_t i = rows.begin; i < smaller(rows.end, plan_.real_rows(t.expert, t.block)); ++i) {
      const RowSource source = rows_[t.block * kRowBlock + i];
      const int64_t token = source.slot / shape_.top_k;
      visit_(Region{from, source.rank, false, token, token + 1, {0, 1}, 0});
      if (from == Storage::dy) {
        visit_(Region{Storage::weights, source.rank, false, source.slot, int64_t{source.slot} + 1, {0, 1}, 0});
      }
    }
    ring(to, true, t.block, rows, {0, 1});
    if (from == Storage::dy) ring(Storage::row_weights, true, t.block, rows, {0, 1});
  }

  // One tile of columns of every row, at the rows' sources.
  MOK_FN void push(const Task& t, Storage storage, int32_t tile) {
    for (int32_t i = 0; i < plan_.real_rows(t.expert, t.block); ++i) {
      const RowSource source = rows_[t.block * kRowBlock + i];
      visit_(Region{storage, source.rank, true, source.slot, int64_t{source.slot} + 1, {tile, tile + 1}, 0});
    }
  }

  MOK_FN void gate_up(const Task& t) {
    read_block(Storage::rows, t.block);
    if (forward_) write_tile(Storage::hidden, t);
    const bool saved = t.macrobatch == 0 && plan_.save != Save::nothing;
    if (!forward_ || saved) write_tile(Storage::pre_activations, t);
  }

  MOK_FN void hidden_grad(const Task& t) {
    read_block(Storage::grads, t.block);
    read_block(Storage::row_weights, t.block);
    if (replays(plan_, t.macrobatch)) read_block(Storage::pre_activations, t.block, plan_.tiles.gate_up);
    for (Storage written : {Storage::gate_up_grads, Storage::hidden, Storage::router_parts}) write_tile(written, t);
  }

  // The first tile also sums and pushes the router gradients.
  MOK_FN void row_grad(const Task& t) {
    read_block(Storage::gate_up_grads, t.block, plan_.tiles.hidden_grad);
    push(t, Storage::slots, t.part);
    if (t.part != 0) return;
    read_block(Storage::router_parts, t.block, plan_.tiles.hidden_grad);
    push(t, Storage::router_grads, 0);
  }

  MOK_FN void weight_grad(const Task& t) {
    for (int32_t block = t.block; block < t.block + t.blocks; ++block) {
      if (pulls_rows(plan_, t.macrobatch)) read_block(Storage::rows, block);
      read_block(Storage::grads, block);
      read_block(Storage::hidden, block, plan_.tiles.hidden_grad);
      read_block(Storage::gate_up_grads, block, plan_.tiles.hidden_grad);
    }
    const Range tile{t.part, t.part + 1};
    const int32_t piece = plan_.piece(t.macrobatch, t.expert);
    if (plan_.begins_earlier(t.macrobatch, t.expert)) {
      visit_(Region{Storage::straddle, plan_.rank, false, 0, 1, tile, piece - 1});
    }
    if (plan_.ends_later(t.macrobatch, t.expert)) {
      visit_(Region{Storage::straddle, plan_.rank, true, 0, 1, tile, piece});
    } else {
      visit_(Region{Storage::expert_grads, plan_.rank, true, t.expert, int64_t{t.expert} + 1, tile, 0});
    }
  }

  // A band of columns; the first one also takes the router gradients.
  MOK_FN void reduce(const Task& t) {
    const Range columns = (forward_ ? down_bands(plan_.tiles) : row_grad_bands(plan_.tiles)).of(t.part);
    const int64_t begin = t.block * kReduceTokens, end = smaller(begin + kReduceTokens, shape_.tokens);
    for (int64_t slot = begin * shape_.top_k; slot < end * shape_.top_k; ++slot) {
      if (ids_[slot] < 0) continue;
      visit_(Region{Storage::slots, plan_.rank, false, slot, slot + 1, columns, 0});
      const Storage beside = forward_ ? Storage::weights : Storage::router_grads;
      if (forward_ || t.part == 0) visit_(Region{beside, plan_.rank, false, slot, slot + 1, {0, 1}, 0});
    }
    visit_(Region{Storage::out, plan_.rank, true, begin, end, columns, 0});
  }

  bool forward_;
  const Shape& shape_;
  const Plan& plan_;
  const RowSource* rows_;
  const int32_t* ids_;
  Visit visit_;
};

}  // namespace mok
