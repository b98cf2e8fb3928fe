// Which tasks are certain to be finished before another begins, and whether that covers every two that conflict.
//
// All that counts as certain:
// - A task runs after all ranks have filled their arenas.
// - A task with a wait runs after every task without whose signals the wait's target cannot be reached: the sum of all
//   signals that the counter can ever get, less that task's own, is below the target. The signaller's reads and writes
//   are over by then (signals release, waits acquire), and so is what was certain to precede it.
// - A rank leaves the call when all tasks of both its lists are finished, and no rank waits for another in order to
//   leave. The next call may then write its arena.
// The order of a list does NOT count: tasks are claimed in it, but many workers run one list, so that a task may begin
// and end while earlier claimed ones run or wait.
#pragma once

#include "moe/regions.h"
#include "verify/enumerate.h"

namespace mok::verify {

class HappensBefore {
 public:
  // `order` is that of any run that came to its end: what is certain agrees with every run.
  HappensBefore(const JointProgram& program, const std::vector<int32_t>& order);

  // Nodes; a rank's leaving is the number of nodes + rank, and only good for `second`.
  bool certain(int32_t first, int32_t second) const {
    return earlier_[second * words_ + first / 64] >> (first % 64) & 1;
  }

 private:
  struct Contribution {
    int32_t node, amount;
  };
  struct Gate {
    int32_t target = 0;
    std::vector<uint64_t> earlier;
  };

  void find_contributions(const JointProgram& program);
  std::vector<uint64_t> before_wait(const Wait& wait) const;
  void add_wait(int32_t node, const Wait& wait);

  size_t words_;
  std::vector<uint64_t> earlier_;  // [nodes + ranks, words_], a set of nodes each
  std::vector<std::vector<Contribution>> contributions_;
  std::vector<Gate> gates_;  // of each counter: what its first wait is certain of; others have the same target
};

// Signals without which a wait's target cannot be reached, as nodes.
std::vector<int32_t> needed_by(const JointProgram& program, const Wait& wait);

// The memory of all ranks, divided into cells that a task uses wholly or not at all, and who uses them.
class Accesses {
 public:
  explicit Accesses(const JointProgram& program);

  // Nothing, or a result that is not written exactly once. Needs no order.
  std::string find_wrong_result() const;

  // Nothing, or two accesses of one cell, not both reads, of which none is certain to precede the other; or a read that
  // finds something other than it expects. `order` as above.
  std::string find_conflict(const HappensBefore& certain, const std::vector<int32_t>& order) const;

 private:
  struct Access {
    int32_t cell;
    int32_t content;
    bool write;
  };
  // The cells of one storage of one rank: `rows` by `columns`, a row of cells being `unit` rows.
  struct Area {
    int32_t first_cell, rows, columns, unit;
  };

  Area area_of(Storage storage, const RankPlan& r) const;
  void add(const Region& region);
  std::string describe_cell(int32_t cell) const;

  const JointProgram& program_;
  std::vector<Area> areas_;  // [ranks, kStorages]
  std::vector<Access> accesses_;
  std::vector<int32_t> begin_;  // [nodes + ranks + 1] into accesses_
  int32_t cells_ = 0;
};

}  // namespace mok::verify
