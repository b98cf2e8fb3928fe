#include "verify/order.h"

#include <algorithm>

namespace mok::verify {

HappensBefore::HappensBefore(const JointProgram& program, const std::vector<int32_t>& order)
    : words_((program.nodes().size() + 63) / 64),
      earlier_((program.nodes().size() + program.ranks().size()) * words_),
      contributions_(program.counters()),
      gates_(program.counters()) {
  find_contributions(program);
  const auto include = [this](int32_t node, int32_t one_more) {
    for (size_t w = 0; w < words_; ++w) earlier_[node * words_ + w] |= earlier_[one_more * words_ + w];
    earlier_[node * words_ + one_more / 64] |= uint64_t{1} << (one_more % 64);
  };
  for (int32_t node : order) {
    for (const Wait& wait : program.nodes()[node].waits) add_wait(node, wait);
  }
  const int32_t nodes = static_cast<int32_t>(program.nodes().size());
  for (int32_t node = 0; node < nodes; ++node) include(nodes + program.nodes()[node].rank, node);
}

void HappensBefore::find_contributions(const JointProgram& program) {
  for (int32_t node = 0; node < static_cast<int32_t>(program.nodes().size()); ++node) {
    for (const Signal& signal : program.nodes()[node].signals) {
      contributions_[signal.counter].push_back({node, signal.amount});
    }
  }
}

std::vector<uint64_t> HappensBefore::before_wait(const Wait& wait) const {
  std::vector<uint64_t> earlier(words_);
  int64_t total = 0;
  for (const Contribution& c : contributions_[wait.counter]) total += c.amount;
  for (const Contribution& c : contributions_[wait.counter]) {
    if (total - c.amount >= wait.target) continue;
    for (size_t w = 0; w < words_; ++w) earlier[w] |= earlier_[c.node * words_ + w];
    earlier[c.node / 64] |= uint64_t{1} << (c.node % 64);
  }
  return earlier;
}

void HappensBefore::add_wait(int32_t node, const Wait& wait) {
  Gate& gate = gates_[wait.counter];
  if (gate.earlier.empty()) gate = {wait.target, before_wait(wait)};
  const auto add = [&](const std::vector<uint64_t>& earlier) {
    for (size_t w = 0; w < words_; ++w) earlier_[node * words_ + w] |= earlier[w];
  };
  if (gate.target == wait.target) {
    add(gate.earlier);
  } else {
    add(before_wait(wait));
  }
}

std::vector<int32_t> needed_by(const JointProgram& program, const Wait& wait) {
  int64_t total = 0;
  for (const Node& node : program.nodes()) {
    for (const Signal& signal : node.signals) total += signal.counter == wait.counter ? signal.amount : 0;
  }
  std::vector<int32_t> needed;
  for (int32_t i = 0; i < static_cast<int32_t>(program.nodes().size()); ++i) {
    for (const Signal& signal : program.nodes()[i].signals) {
      if (signal.counter == wait.counter && total - signal.amount < wait.target) needed.push_back(i);
    }
  }
  return needed;
}

Accesses::Accesses(const JointProgram& program) : program_(program), begin_{0} {
  for (const auto& r : program.ranks()) {
    for (int32_t s = 0; s < kStorages; ++s) {
      areas_.push_back(area_of(static_cast<Storage>(s), *r));
      cells_ += areas_.back().rows * areas_.back().columns;
    }
  }
  const auto regions_of = [&](int32_t rank) {
    const RankPlan& r = *program.ranks()[rank];
    return Regions(program.of().direction, r.shape, r.plan, r.rows.data(), r.clean.data(),
                   [this](const Region& region) { add(region); });
  };
  for (const Node& node : program.nodes()) {
    regions_of(node.rank).of_task(node.task);
    begin_.push_back(static_cast<int32_t>(accesses_.size()));
  }
  for (int32_t rank = 0; rank < static_cast<int32_t>(program.ranks().size()); ++rank) {
    regions_of(rank).at_exit();
    begin_.push_back(static_cast<int32_t>(accesses_.size()));
  }
}

Accesses::Area Accesses::area_of(Storage storage, const RankPlan& r) const {
  const bool forward = program_.of().direction == Direction::forward;
  const TileCounts& tiles = r.plan.tiles;
  const auto area = [&](int64_t rows, int32_t columns, int64_t unit = 1) {
    return Area{cells_, static_cast<int32_t>(rows / unit), columns, static_cast<int32_t>(unit)};
  };
  switch (storage) {
    case Storage::rows:
    case Storage::grads:
    case Storage::row_weights:
      return area(r.shape.ring_rows, 1, kPullRows);
    case Storage::pre_activations:
      return area(r.shape.ring_rows, tiles.gate_up, kRowBlock);
    case Storage::hidden:
      return area(r.shape.ring_rows, forward ? tiles.gate_up : tiles.hidden_grad, kRowBlock);
    case Storage::gate_up_grads:
    case Storage::router_parts:
      return area(r.shape.ring_rows, tiles.hidden_grad, kRowBlock);
    case Storage::straddle:
      return area(1, tiles.weight_grad);
    case Storage::expert_grads:
      return area(r.shape.local_experts, tiles.weight_grad);
    case Storage::x:
    case Storage::dy:
      return area(r.shape.tokens, 1);
    case Storage::out:
      return area(r.shape.tokens, forward ? tiles.down : tiles.row_grad);
    case Storage::weights:
    case Storage::router_grads:
      return area(r.shape.slots(), 1);
    case Storage::slots:
      return area(r.shape.slots(), forward ? tiles.down : tiles.row_grad);
  }
  return {};
}

void Accesses::add(const Region& region) {
  const Area& area = areas_[region.rank * kStorages + static_cast<int32_t>(region.storage)];
  for (int64_t row = region.begin / area.unit; row < ceil_div(region.end, area.unit); ++row) {
    for (int32_t column = region.columns.begin; column < region.columns.end; ++column) {
      const int64_t cell = area.first_cell + row * area.columns + column;
      accesses_.push_back({static_cast<int32_t>(cell), region.content, region.write});
    }
  }
}

std::string Accesses::describe_cell(int32_t cell) const {
  const auto after = std::ranges::upper_bound(areas_, cell, {}, &Area::first_cell);
  const int64_t number = after - areas_.begin() - 1;
  const Area& area = areas_[number];
  const int32_t at = cell - area.first_cell;
  return std::string(kStorageNames[number % kStorages]) + " of rank " + std::to_string(number / kStorages) + ", row " +
         std::to_string(at / area.columns * area.unit) + ", tile " + std::to_string(at % area.columns);
}

std::string Accesses::find_wrong_result() const {
  std::vector<int32_t> writes(cells_);
  const size_t nodes = program_.nodes().size();
  for (int32_t i = 0; i < begin_[nodes]; ++i) writes[accesses_[i].cell] += accesses_[i].write;
  for (const auto& r : program_.ranks()) {
    for (Storage storage : {Storage::out, Storage::expert_grads, Storage::slots, Storage::router_grads}) {
      const bool forward = program_.of().direction == Direction::forward;
      if (forward && (storage == Storage::expert_grads || storage == Storage::router_grads)) continue;
      const bool of_slots = storage == Storage::slots || storage == Storage::router_grads;
      const Area& area = areas_[r->plan.rank * kStorages + static_cast<int32_t>(storage)];
      for (int32_t i = 0; i < area.rows * area.columns; ++i) {
        const int32_t expected = of_slots && r->clean[i / area.columns] < 0 ? 0 : 1;
        const int32_t cell = area.first_cell + i;
        if (writes[cell] == expected) continue;
        return describe_cell(cell) + " is written " + std::to_string(writes[cell]) + " times";
      }
    }
  }
  return {};
}

namespace {

// What is known of one cell while the accesses pass by in an order that agrees with everything certain. It is enough
// to compare neighbours: if each write is certain to follow the write before it and all reads in between, and each read
// the write before it, then every two that conflict are ordered.
struct Cell {
  int32_t writer = -1;   // none yet
  int32_t content = -1;  // nothing yet
  int32_t readers = -1;  // since then, a linked list
};
struct Reader {
  int32_t node, next;
};

bool filled_at_entry(Storage s) { return s == Storage::x || s == Storage::dy || s == Storage::weights; }

}  // namespace

std::string Accesses::find_conflict(const HappensBefore& certain, const std::vector<int32_t>& order) const {
  std::vector<Cell> cells(cells_);
  std::vector<Reader> readers;
  for (size_t a = 0; a < areas_.size(); ++a) {
    if (!filled_at_entry(static_cast<Storage>(a % kStorages))) continue;
    for (int32_t i = 0; i < areas_[a].rows * areas_[a].columns; ++i) cells[areas_[a].first_cell + i].content = 0;
  }
  std::vector<int32_t> all = order;  // and the ranks' leaving: nothing is certain to follow that
  for (size_t r = 0; r < program_.ranks().size(); ++r) all.push_back(static_cast<int32_t>(order.size() + r));
  for (int32_t node : all) {
    for (int32_t i = begin_[node]; i < begin_[node + 1]; ++i) {
      const Access& access = accesses_[i];
      Cell& cell = cells[access.cell];
      const auto unordered = [&](int32_t other) {
        return describe_cell(access.cell) + ": no wait orders " + program_.describe(other) + " and " +
               program_.describe(node);
      };
      if (cell.writer >= 0 && cell.writer != node && !certain.certain(cell.writer, node)) return unordered(cell.writer);
      if (!access.write) {
        if (cell.content != access.content) {
          return describe_cell(access.cell) + " holds " + std::to_string(cell.content) + " where " +
                 std::to_string(access.content) + " is expected by " + program_.describe(node);
        }
        readers.push_back({node, cell.readers});
        cell.readers = static_cast<int32_t>(readers.size()) - 1;
        continue;
      }
      for (int32_t r = cell.readers; r >= 0; r = readers[r].next) {
        if (readers[r].node != node && !certain.certain(readers[r].node, node)) return unordered(readers[r].node);
      }
      cell = {node, access.content, -1};
    }
  }
  return {};
}

}  // namespace mok::verify
