// The task program of all ranks of a call, in one numbering, and machines that run it. What a run shows: whether the
// ranks together can stop before their lists are empty. One worker a list is the hardest case: every wait only compares
// a counter that grows, so whatever ends with it ends, in any order, with more workers.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "moe/lists.h"

namespace mok::verify {

struct Case {
  Direction direction;
  Save save;
  Shape shape;  // of rank 0
  TileCounts tiles;
  std::vector<int32_t> ids;  // [ranks, tokens, top_k], as a user gives them
};

// One rank's tables, and the plan that points at them.
struct RankPlan {
  Shape shape;
  Plan plan;
  std::vector<int32_t> expert_rows, expert_block, macro_block;
  std::vector<int32_t> clean;  // of its own slots
  std::vector<RowSource> rows;

  RankPlan(const Case& c, const std::vector<int32_t>& clean_ids, int64_t rank);
  RankPlan(const RankPlan&) = delete;
};

struct Signal {
  int32_t counter, amount;
};

// A task of some rank; counters are numbered over all ranks.
struct Node {
  int32_t rank;
  Task task;
  std::vector<Wait> waits;
  std::vector<Signal> signals;
};

class JointProgram {
 public:
  explicit JointProgram(const Case& c);

  const Case& of() const { return case_; }
  const std::vector<std::unique_ptr<RankPlan>>& ranks() const { return ranks_; }
  std::vector<Node>& nodes() { return nodes_; }
  const std::vector<Node>& nodes() const { return nodes_; }
  // Lists are numbered rank * 2, + 1 for compute; their nodes are consecutive.
  Range list(int32_t number) const { return {list_begin_[number], list_begin_[number + 1]}; }
  int32_t counters() const { return first_counter_.back(); }

  struct CounterName {
    int32_t rank;
    Counter family;
    int32_t index;  // the row block or the piece
  };
  CounterName name(int32_t counter) const;
  std::string describe(int32_t node) const;
  std::string describe_counter(int32_t counter) const;

  // Nothing, or which task is missing, there twice, in a run or piece that it does not fit, or waits: for more than all
  // signals together, or as a first pull for anything.
  std::string find_wrong_task() const;

 private:
  void add_list(int32_t rank, const TaskLists& lists, const TaskList& list);
  Node make_node(int32_t rank, const Task& task) const;
  int64_t expected_tasks(const RankPlan& r) const;
  std::string find_wrong_first_pull() const;
  std::string find_wrong_run() const;
  std::string find_wrong_piece() const;

  Case case_;
  std::vector<std::unique_ptr<RankPlan>> ranks_;
  std::vector<Node> nodes_;
  std::vector<int32_t> list_begin_, first_pulls_, first_counter_;
};

// Who runs the lists. Dedicated: every CTA is a worker of one list. Shared: every CTA holds a worker of each, and
// neither of the two keeps the other from going on. A worker claims its list's next task and runs it once its waits are
// met. The seed sets whose turn it is. Where runs go together, a task waits for what the next one of its run waits for,
// too: CTAs that come in pairs do some of that, since neither of two that share an operand gets far without the other.
struct Machine {
  bool shared = false;
  int32_t communication_workers = 1, compute_workers = 1;  // of a rank; as many CTAs, where shared, as the larger
  uint64_t seed = 0;
  bool runs_go_together = false;
};

struct Run {
  std::vector<int32_t> order;  // nodes, as they ran
  std::string deadlock;        // empty, or who waits for what
};

Run run(const JointProgram& program, const Machine& machine);

}  // namespace mok::verify
