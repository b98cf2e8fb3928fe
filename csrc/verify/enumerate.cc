#include "verify/enumerate.h"

#include <algorithm>
#include <numeric>
#include <random>
#include <set>
#include <tuple>

namespace mok::verify {

RankPlan::RankPlan(const Case& c, const std::vector<int32_t>& clean_ids, int64_t rank)
    : shape(c.shape), expert_rows(shape.local_experts), expert_block(shape.local_experts + 1) {
  shape.rank = rank;
  const int64_t slots = shape.slots();
  const auto ids = [&](int64_t r, int64_t slot) { return clean_ids[r * slots + slot]; };
  count_rows(shape, ids, expert_rows.data(), expert_block.data());
  std::vector<int64_t> next(shape.local_experts);
  rows.resize(expert_block.back() * kRowBlock);
  fill_row_table(shape, ids, expert_rows.data(), expert_block.data(), next.data(), rows.data());
  clean.assign(clean_ids.begin() + rank * slots, clean_ids.begin() + (rank + 1) * slots);

  macro_block.resize(max_macrobatches(shape) + 1);
  const auto valid_slots = std::ranges::count_if(clean, [](int32_t id) { return id >= 0; });
  make_plan(shape, c.tiles, c.save, static_cast<int32_t>(valid_slots), expert_rows.data(), expert_block.data(),
            macro_block.data(), plan);
}

JointProgram::JointProgram(const Case& c) : case_(c), list_begin_{0}, first_counter_{0} {
  const int64_t slots = c.shape.slots();
  std::vector<int32_t> clean(c.ids.size());
  std::vector<uint8_t> bad(c.shape.tokens);
  for (int64_t r = 0; r < c.shape.ranks; ++r) {
    clean_expert_ids(c.shape, c.ids.data() + r * slots, clean.data() + r * slots, bad.data());
  }
  for (int32_t r = 0; r < c.shape.ranks; ++r) {
    ranks_.push_back(std::make_unique<RankPlan>(c, clean, r));
    first_counter_.push_back(first_counter_.back() + CounterMap(ranks_.back()->plan).size());
  }
  for (int32_t r = 0; r < c.shape.ranks; ++r) {
    const TaskLists lists(c.direction, c.shape, ranks_[r]->plan);
    for (const TaskList* list : {&lists.communication(), &lists.compute()}) add_list(r, lists, *list);
  }
}

void JointProgram::add_list(int32_t rank, const TaskLists& lists, const TaskList& list) {
  for (int64_t ticket = 0; ticket < list.tasks; ++ticket) {
    nodes_.push_back(make_node(rank, lists.task(list, ticket)));
  }
  first_pulls_.push_back(static_cast<int32_t>(list.first_pulls()));
  list_begin_.push_back(static_cast<int32_t>(nodes_.size()));
}

Node JointProgram::make_node(int32_t rank, const Task& task) const {
  Node node{rank, task, {}, {}};
  const int32_t base = first_counter_[rank];
  for (int32_t i = 0; i < task.wait_count; ++i) {
    node.waits.push_back({base + task.waits[i].counter, task.waits[i].target});
  }
  for (int32_t i = 0; i < task.signal_count; ++i) node.signals.push_back({base + task.signals[i], 1});
  if (task.kind != TaskKind::notify) return node;
  const RankPlan& r = *ranks_[rank];
  for (int32_t i = 0; i < r.plan.real_rows(task.expert, task.block); ++i) {
    const int32_t source = r.rows[task.block * kRowBlock + i].rank;
    const int32_t arrived = first_counter_[source] + CounterMap(ranks_[source]->plan).arrived(task.part);
    if (node.signals.empty() || node.signals.back().counter != arrived) node.signals.push_back({arrived, 0});
    ++node.signals.back().amount;
  }
  return node;
}

JointProgram::CounterName JointProgram::name(int32_t counter) const {
  const auto rank =
      static_cast<int32_t>(std::ranges::upper_bound(first_counter_, counter) - first_counter_.begin()) - 1;
  const CounterMap map(ranks_[rank]->plan);
  const int32_t at = counter - first_counter_[rank];
  int32_t family = static_cast<int32_t>(Counter::arrived);  // families follow one another; empty ones begin together
  while (map.of(static_cast<Counter>(family)) > at) --family;
  return {rank, static_cast<Counter>(family), at - map.of(static_cast<Counter>(family))};
}

std::string JointProgram::describe(int32_t node) const {
  const int32_t nodes = static_cast<int32_t>(nodes_.size());
  if (node >= nodes) return "rank " + std::to_string(node - nodes) + " leaving the call";
  const Node& n = nodes_[node];
  return "rank " + std::to_string(n.rank) + " " + kTaskNames[static_cast<int>(n.task.kind)] + " of macrobatch " +
         std::to_string(n.task.macrobatch) + ", expert " + std::to_string(n.task.expert) + ", block " +
         std::to_string(n.task.block) + ", part " + std::to_string(n.task.part);
}

std::string JointProgram::describe_counter(int32_t counter) const {
  const auto [rank, family, index] = name(counter);
  return std::string(kCounterNames[static_cast<int>(family)]) + " " + std::to_string(index) + " of rank " +
         std::to_string(rank);
}

// Counted from what the call has to do, not from the lists.
int64_t JointProgram::expected_tasks(const RankPlan& r) const {
  const Plan& p = r.plan;
  const TileCounts& tiles = p.tiles;
  const int64_t blocks = p.blocks(), saved = p.macro_block[1];
  if (case_.direction == Direction::forward) {
    const int64_t bands = down_bands(tiles).count();
    return blocks * (kPullsPerBlock + tiles.gate_up + tiles.down + bands) + p.token_blocks * bands;
  }
  const int64_t replayed = p.save == Save::nothing ? blocks : blocks - saved;
  const int64_t pulled = p.save == Save::pre_activations_and_rows ? blocks - saved : blocks;
  int64_t pieces = p.experts;  // and one more for each expert that a cut divides
  for (int32_t m = 1; m < p.macrobatches; ++m) {
    pieces += std::ranges::find(r.expert_block, p.macro_block[m]) == r.expert_block.end();
  }
  return blocks * (kPullsPerBlock + tiles.hidden_grad + tiles.row_grad + 1) + pulled * kPullsPerBlock +
         replayed * tiles.gate_up + pieces * tiles.weight_grad + p.token_blocks * row_grad_bands(tiles).count();
}

std::string JointProgram::find_wrong_task() const {
  std::vector<int64_t> total(counters());
  for (const Node& node : nodes_) {
    for (const Signal& signal : node.signals) total[signal.counter] += signal.amount;
  }
  std::set<std::tuple<int32_t, TaskKind, int32_t, int32_t, int32_t, int32_t>> seen;
  for (int32_t i = 0; i < static_cast<int32_t>(nodes_.size()); ++i) {
    const Task& t = nodes_[i].task;
    if (!seen.emplace(nodes_[i].rank, t.kind, t.macrobatch, t.block, t.expert, t.part).second) {
      return "there twice: " + describe(i);
    }
    for (const Wait& wait : nodes_[i].waits) {
      if (total[wait.counter] < wait.target) {
        return describe(i) + " waits for more than ever comes: " + describe_counter(wait.counter);
      }
    }
  }
  if (const std::string wrong = find_wrong_first_pull(); !wrong.empty()) return wrong;
  if (const std::string wrong = find_wrong_run(); !wrong.empty()) return wrong;
  if (const std::string wrong = find_wrong_piece(); !wrong.empty()) return wrong;
  int64_t expected = 0;
  for (const auto& r : ranks_) expected += expected_tasks(*r);
  if (expected == static_cast<int64_t>(nodes_.size())) return {};
  return std::to_string(nodes_.size()) + " tasks where " + std::to_string(expected) + " are to be done";
}

// An executor may run first pulls before anything else, whoever does it.
std::string JointProgram::find_wrong_first_pull() const {
  for (size_t list = 0; list < first_pulls_.size(); ++list) {
    for (int32_t i = list_begin_[list]; i < list_begin_[list] + first_pulls_[list]; ++i) {
      if (!nodes_[i].waits.empty()) return "a first pull that waits: " + describe(i);
    }
  }
  return {};
}

// A list is one run after the other, each one tile of weights for some blocks, and all tasks know their places: two
// that share an operand must agree on it.
std::string JointProgram::find_wrong_run() const {
  const auto run_of = [](const Task& t, int32_t in_run) {
    return std::tuple(t.kind, t.macrobatch, t.expert, t.part, t.run, in_run);
  };
  for (size_t list = 0; list + 1 < list_begin_.size(); ++list) {
    for (int32_t begin = list_begin_[list], end; begin < list_begin_[list + 1]; begin = end) {
      const Task& first = nodes_[begin].task;
      end = begin + first.run;
      if (first.run < 1 || end > list_begin_[list + 1]) return "its run is not all in its list: " + describe(begin);
      for (int32_t i = begin; i < end; ++i) {
        const Task& t = nodes_[i].task;
        if (run_of(t, t.in_run) != run_of(first, i - begin)) return "not where its run has it: " + describe(i);
      }
    }
  }
  return {};
}

// An executor that has one tile of a piece makes the next one of it, and does not wait again.
std::string JointProgram::find_wrong_piece() const {
  const auto piece_of = [](const Task& t) { return std::tuple(t.kind, t.macrobatch, t.expert); };
  const auto all_but_part = [](const Task& t) {
    std::vector<int32_t> all{t.block, t.blocks};
    for (int32_t i = 0; i < t.wait_count; ++i) all.insert(all.end(), {t.waits[i].counter, t.waits[i].target});
    all.insert(all.end(), t.signals, t.signals + t.signal_count);
    return all;
  };
  for (size_t list = 0; list + 1 < list_begin_.size(); ++list) {
    for (int32_t i = list_begin_[list]; i + 1 < list_begin_[list + 1]; ++i) {
      const Task &t = nodes_[i].task, &next = nodes_[i + 1].task;
      if (t.kind != TaskKind::weight_grad || piece_of(t) != piece_of(next)) continue;
      if (next.part != t.part + 1) return "out of order: " + describe(i + 1);
      if (all_but_part(next) != all_but_part(t)) return "not like the others of its piece: " + describe(i + 1);
    }
  }
  return {};
}

namespace {

struct Worker {
  int32_t list;
  int32_t claimed = -1;
};
using Cta = std::vector<Worker>;

class Runner {
 public:
  Runner(const JointProgram& program, const Machine& machine)
      : program_(program),
        random_(machine.seed),
        value_(program.counters()),
        runs_go_together_(machine.runs_go_together) {
    for (int32_t rank = 0; rank < static_cast<int32_t>(program.ranks().size()); ++rank) {
      const int32_t communication = 2 * rank, compute = communication + 1;
      next_.push_back(program.list(communication).begin);
      next_.push_back(program.list(compute).begin);
      if (machine.shared) {
        const int32_t ctas = std::max(machine.communication_workers, machine.compute_workers);
        ctas_.insert(ctas_.end(), ctas, Cta{{communication}, {compute}});
      } else {
        ctas_.insert(ctas_.end(), machine.communication_workers, Cta{{communication}});
        ctas_.insert(ctas_.end(), machine.compute_workers, Cta{{compute}});
      }
    }
  }

  Run run() {
    run_.order.reserve(program_.nodes().size());
    for (bool moved = true; moved;) {
      moved = false;
      std::ranges::shuffle(ctas_, random_);
      for (Cta& cta : ctas_) moved |= turn(cta);
    }
    for (const Cta& cta : ctas_) {
      for (const Worker& worker : cta) {
        if (worker.claimed >= 0 && run_.deadlock.empty()) run_.deadlock = describe_wait(unready(worker.claimed));
      }
    }
    return std::move(run_);
  }

 private:
  // Some rounds over the CTA's workers, each of which may run one task a round.
  bool turn(Cta& cta) {
    bool any = false, moved = true;
    for (uint64_t rounds = 1 + random_() % 64; moved && rounds > 0; --rounds) {
      moved = false;
      for (Worker& worker : cta) moved |= step(worker);
      any |= moved;
    }
    return any;
  }

  bool step(Worker& worker) {
    if (worker.claimed < 0) {
      if (next_[worker.list] == program_.list(worker.list).end) return false;
      worker.claimed = next_[worker.list]++;
    }
    const Node& node = program_.nodes()[worker.claimed];
    if (unready(worker.claimed) >= 0) return false;
    for (const Signal& signal : node.signals) value_[signal.counter] += signal.amount;
    run_.order.push_back(worker.claimed);
    worker.claimed = -1;
    return true;
  }

  // Of the node, and perhaps the next one of its run, the one that has to wait; or -1.
  int32_t unready(int32_t node) const {
    const auto ready = [this](const Node& n) {
      return std::ranges::all_of(n.waits, [this](const Wait& wait) { return value_[wait.counter] >= wait.target; });
    };
    const Task& t = program_.nodes()[node].task;
    if (!ready(program_.nodes()[node])) return node;
    if (runs_go_together_ && t.in_run + 1 < t.run && !ready(program_.nodes()[node + 1])) return node + 1;
    return -1;
  }

  std::string describe_wait(int32_t node) const {
    std::string text = program_.describe(node) + " waits for";
    for (const Wait& wait : program_.nodes()[node].waits) {
      if (value_[wait.counter] >= wait.target) continue;
      text += " " + program_.describe_counter(wait.counter) + ": " + std::to_string(value_[wait.counter]) + " of " +
              std::to_string(wait.target);
    }
    return text;
  }

  const JointProgram& program_;
  std::minstd_rand random_;
  std::vector<int32_t> value_, next_;
  std::vector<Cta> ctas_;
  const bool runs_go_together_;
  Run run_;
};

}  // namespace

Run run(const JointProgram& program, const Machine& machine) { return Runner(program, machine).run(); }

}  // namespace mok::verify
