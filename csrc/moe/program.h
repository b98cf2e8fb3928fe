// The vocabulary of the task program: counters, tasks, and task lists that are pure functions from a ticket to a task.
// forward.h and backward.h say which tasks there are; executors claim tickets in order, wait, run, signal.
//
// Rules that keep it free of deadlock (see the enumeration in the tests): every wait is counter >= target on a counter
// that only grows within a call; a list is claimed in its order; a task whose waits are met always finishes.
#pragma once

#include <iterator>

#include "moe/plan.h"

namespace mok {

struct Range {
  int32_t begin = 0, end = 0;
  MOK_FN int32_t size() const { return end - begin; }
  MOK_FN bool overlaps(int32_t other_begin, int32_t other_end) const { return begin < other_end && other_begin < end; }
};

// The tiles that a product of columns is divided into come in bands, each half of what the bands before it have left.
struct ColumnBands {
  int32_t tiles, most;

  MOK_FN Range of(int32_t band) const {
    const int32_t left = band < most ? tiles >> band : 0, later = band + 1 < most ? tiles >> (band + 1) : 0;
    return {tiles - left, tiles - later};
  }
  MOK_FN int32_t holding(int32_t tile) const {
    int32_t band = 0;
    while (tile >= of(band).end) ++band;
    return band;
  }
  MOK_FN int32_t count() const { return holding(tiles - 1) + 1; }  // where tiles are few, the last ones are empty
};
// Of y: while the down tiles of one band are computed, tokens are reduced over the columns of the one before.
MOK_FN ColumnBands down_bands(const TileCounts& tiles) { return {tiles.down, tiles.down_bands}; }
// Of dx: one reduce task takes the columns of one.
MOK_FN ColumnBands row_grad_bands(const TileCounts& tiles) { return {tiles.row_grad, kColumnBands}; }

// Families of counters. Those of a row block or of a piece are written by this rank alone; `arrived` by every rank.
enum class Counter : int32_t {
  rows_pulled,        // of a block: pull tasks that have put its rows into the ring
  grads_pulled,       // of a block: likewise dy, and the router weights
  gate_up_done,       // of a block: tiles
  hidden_grad_done,   // of a block: tiles
  pushed,             // of a block and a band: tiles of down, or of row_grad (one band), their rows at the sources
  piece_rows_pulled,  // of a piece: pull tasks
  piece_hidden_grad,  // of a piece: tiles
  piece_weight_grad,  // of a piece: tiles
  arrived,            // of a band of the rank: its slots that have come back, counted in rows
};
inline constexpr const char* kCounterNames[] = {
    "rows_pulled",       "grads_pulled",      "gate_up_done",      "hidden_grad_done", "pushed",
    "piece_rows_pulled", "piece_hidden_grad", "piece_weight_grad", "arrived"};
static_assert(std::size(kCounterNames) == static_cast<size_t>(Counter::arrived) + 1);
// pushed, the last of a block, counts as one for each band; all from there to arrived are of a piece.
inline constexpr int32_t kBlockFamilies = static_cast<int32_t>(Counter::pushed) + kColumnBands;
inline constexpr int32_t kPieceFamilies =
    static_cast<int32_t>(Counter::arrived) - static_cast<int32_t>(Counter::pushed) - 1;

// Where each counter lives in one flat array of a rank.
struct CounterMap {
  int32_t blocks, pieces;

  MOK_FN explicit CounterMap(const Plan& p) : blocks(p.blocks()), pieces(p.pieces()) {}
  MOK_FN int32_t size() const { return arrived(kColumnBands); }
  MOK_FN int32_t of(Counter family, int32_t index = 0) const {
    const int32_t f = static_cast<int32_t>(family), first_of_pieces = static_cast<int32_t>(Counter::pushed) + 1;
    if (f < first_of_pieces) return f * blocks + index;
    return kBlockFamilies * blocks + (f - first_of_pieces) * pieces + index;
  }
  MOK_FN int32_t pushed(int32_t block, int32_t band) const { return of(Counter::pushed, band * blocks + block); }
  MOK_FN int32_t arrived(int32_t band) const { return of(Counter::arrived, band); }
};

enum class Direction : int32_t { forward, backward };

enum class TaskKind : int8_t {
  pull_rows,
  pull_grads,
  notify,
  gate_up,
  down,
  hidden_grad,
  row_grad,
  weight_grad,
  reduce
};
inline constexpr const char* kTaskNames[] = {"pull_rows",   "pull_grads", "notify",      "gate_up", "down",
                                             "hidden_grad", "row_grad",   "weight_grad", "reduce"};
static_assert(std::size(kTaskNames) == static_cast<size_t>(TaskKind::reduce) + 1);

struct Wait {
  int32_t counter;
  int32_t target;
};

struct Task {
  TaskKind kind;
  int32_t macrobatch;
  int32_t block;   // row block; the piece's first one for weight_grad; token block for reduce
  int32_t blocks;  // row blocks that it covers
  int32_t expert;  // local; -1 for reduce
  int32_t part;    // which tile or pull of the block or piece; which band of columns for notify and reduce
  // Its place among neighbours in the list that multiply with the same tile of weights, and how many these are. Not of
  // weight_grad, whose tiles' places only an executor knows; those of a piece differ in nothing but their part.
  int32_t in_run, run;
  int32_t wait_count, signal_count;
  Wait waits[1 + kColumnBands];
  int32_t signals[2];  // each grows by 1. notify instead adds the block's rows to `arrived` of their source ranks

  MOK_FN void wait_for(int32_t counter, int32_t target) {
    if (target > 0) waits[wait_count++] = {counter, target};
  }
  MOK_FN void signal(int32_t counter) { signals[signal_count++] = counter; }
};

// The rows of its block that a pull task fetches; if several workers share it, those of one of them.
MOK_FN Range pulled_rows(const Task& t, int32_t worker = 0, int32_t workers = 1) {
  const int32_t count = static_cast<int32_t>(kPullRows) / workers;
  const int32_t begin = t.part * static_cast<int32_t>(kPullRows) + worker * count;
  return {begin, begin + count};
}

// Consecutive tasks of one kind: for items [begin, end), row blocks or whatever the kind counts, `parts` tasks each,
// from first_part on.
struct Segment {
  TaskKind kind;
  int32_t macrobatch;
  int32_t begin, end;
  int32_t first_part, parts;
  int64_t first_ticket;

  MOK_FN int64_t tasks() const { return int64_t{end - begin} * parts; }
  MOK_FN bool holds(int64_t ticket) const { return ticket >= first_ticket && ticket - first_ticket < tasks(); }
};

// Makes `t` a task of the segment that waits for and signals nothing yet.
MOK_FN void begin_task(Task& t, const Segment& s) {
  t.kind = s.kind;
  t.macrobatch = s.macrobatch;
  t.block = t.part = t.wait_count = t.signal_count = 0;
  t.in_run = 0;
  t.blocks = t.run = 1;
  t.expert = -1;
}

// Where a segment's tasks go: three orders, each from the offset in the segment to an item and its part.
struct ItemPart {
  int32_t item, part;
  int32_t in_run = 0, run = 1;
};

// Item outer, part inner; each rank begins elsewhere, so that not all ranks pull from one source at once.
MOK_FN ItemPart rotated(const Segment& s, const Plan& p, int64_t offset) {
  const int64_t start = s.tasks() * p.rank / p.ranks;
  const int64_t turned = (offset + start) % s.tasks();
  return {s.begin + static_cast<int32_t>(turned / s.parts), s.first_part + static_cast<int32_t>(turned % s.parts)};
}

MOK_FN ItemPart item_outer(const Segment& s, int64_t offset) {
  return {s.begin + static_cast<int32_t>(offset / s.parts), s.first_part + static_cast<int32_t>(offset % s.parts)};
}

// Column tile outer, row block inner, one expert after the other: a tile of weights serves all blocks of its expert.
MOK_FN ItemPart weights_outer(const Segment& s, const Plan& p, int64_t offset) {
  const int32_t e = p.expert_of(s.begin + static_cast<int32_t>(offset / s.parts));
  const int32_t begin = larger(s.begin, p.expert_block[e]);
  const int32_t count = smaller(s.end, p.expert_block[e + 1]) - begin;
  const int64_t rest = offset - int64_t{begin - s.begin} * s.parts;
  const int32_t in_run = static_cast<int32_t>(rest % count);
  return {begin + in_run, s.first_part + static_cast<int32_t>(rest / count), in_run, count};
}

MOK_FN void place(Task& t, const Plan& p, ItemPart at) {
  t.block = at.item;
  t.part = at.part;
  t.in_run = at.in_run;
  t.run = at.run;
  if (t.kind != TaskKind::reduce) t.expert = p.expert_of(at.item);
}

// Minibatches of a macrobatch, as row blocks.
MOK_FN int32_t minibatches(const Plan& p, int32_t m) {
  return static_cast<int32_t>(ceil_div(p.macro_block[m + 1] - p.macro_block[m], p.minibatch_blocks));
}
MOK_FN Range macrobatch(const Plan& p, int32_t m) { return {p.macro_block[m], p.macro_block[m + 1]}; }
MOK_FN Range minibatch(const Plan& p, int32_t m, int32_t index) {
  const int32_t begin = p.macro_block[m] + index * p.minibatch_blocks;
  return {begin, smaller(begin + p.minibatch_blocks, p.macro_block[m + 1])};
}

// So many blocks that are pulled first have a segment of their own. Their pulls wait for nothing, so that workers of
// the compute list, which have nothing to compute yet, may do them.
inline constexpr int32_t kFirstBlocks = 16;

// A task list under construction: segments with their first tickets. The caller provides the memory.
struct TaskList {
  Segment* segments;
  int32_t count = 0;
  int64_t tasks = 0;

  MOK_FN void add(TaskKind kind, int32_t m, Range items, Range parts) {
    if (items.size() <= 0 || parts.size() <= 0) return;
    segments[count] = {kind, m, items.begin, items.end, parts.begin, parts.size(), tasks};
    tasks += segments[count++].tasks();
  }
  MOK_FN void add(TaskKind kind, int32_t m, Range items, int32_t parts) { add(kind, m, items, Range{0, parts}); }
  MOK_FN void add_pulls(TaskKind kind, int32_t m, Range blocks) {
    const int32_t first_end = count > 0 ? blocks.begin : smaller(blocks.begin + kFirstBlocks, blocks.end);
    add(kind, m, {blocks.begin, first_end}, kPullsPerBlock);
    add(kind, m, {first_end, blocks.end}, kPullsPerBlock);
  }
  // Tasks at the begin of a communication list that pull the first blocks.
  MOK_FN int64_t first_pulls() const {
    const bool any = count > 0 && (segments[0].kind == TaskKind::pull_rows || segments[0].kind == TaskKind::pull_grads);
    return any ? segments[0].tasks() : 0;
  }
  // One task for each item, its part the band.
  MOK_FN void add_of_band(TaskKind kind, int32_t m, Range items, int32_t band) {
    add(kind, m, items, Range{band, band + 1});
  }
  MOK_FN const Segment& segment_of(int64_t ticket) const {
    int32_t low = 0, high = count;
    while (high - low > 1) {
      const int32_t middle = (low + high) / 2;
      (segments[middle].first_ticket <= ticket ? low : high) = middle;
    }
    return segments[low];
  }
};

// Segments that a list of either direction can have: at most four a minibatch, one a macrobatch and band, one a band,
// and the first pulls.
MOK_FN int64_t max_segments(const Shape& s) {
  const int64_t macrobatches = max_macrobatches(s);
  return 4 * (ceil_div(max_rows(s), s.minibatch_rows) + macrobatches) + kColumnBands * (macrobatches + 1) + 1;
}

}  // namespace mok
