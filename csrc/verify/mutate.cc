#include "verify/mutate.h"

#include <algorithm>

#include "verify/order.h"

namespace mok::verify {
namespace {

constexpr const char* kSignals = " signals ";
constexpr const char* kWaitsFor = " waits for ";

class Mutations {
 public:
  explicit Mutations(JointProgram& program) : program_(program), accesses_(program), read_(program.counters()) {
    for (const Node& node : program.nodes()) {
      for (const Wait& wait : node.waits) read_[wait.counter] = true;
    }
  }

  std::map<std::string, Tally> try_all() {
    for (int32_t i = 0; i < static_cast<int32_t>(program_.nodes().size()); ++i) {
      Node& node = program_.nodes()[i];
      for (size_t s = 0; s < node.signals.size(); ++s) drop_signal(node, s);
      for (size_t w = 0; w < node.waits.size(); ++w) {
        weaken(i, w, node.waits[w].target - 1);
        weaken(i, w, 0);
      }
    }
    return std::move(tallies_);
  }

 private:
  Tally& tally(const char* what, const Node& node, const char* verb, int32_t counter) {
    const auto [rank, family, _] = program_.name(counter);
    std::string rule = std::string(what) + ": " + kTaskNames[static_cast<int>(node.task.kind)] + verb +
                       kCounterNames[static_cast<int>(family)];
    // Weight gradients wait for each other for two reasons: to go on with what the scratch holds, and to overwrite it.
    const Task& t = node.task;
    if (verb == kWaitsFor && t.kind == TaskKind::weight_grad && family == Counter::piece_weight_grad) {
      rule += program_.ranks()[rank]->plan.begins_earlier(t.macrobatch, t.expert) ? " to go on" : " to overwrite";
    }
    return tallies_[rule];
  }

  void drop_signal(Node& node, size_t s) {
    const Signal signal = node.signals[s];
    Tally& of = tally("drop", node, kSignals, signal.counter);
    node.signals.erase(node.signals.begin() + s);
    ++(!read_[signal.counter] ? of.unread : caught([](const HappensBefore&) {}) ? of.caught : of.missed);
    node.signals.insert(node.signals.begin() + s, signal);
  }

  void weaken(int32_t index, size_t w, int32_t target) {
    Node& node = program_.nodes()[index];
    const Wait wait = node.waits[w];
    Tally& of = tally(target > 0 ? "lower" : "remove", node, kWaitsFor, wait.counter);
    const std::vector<int32_t> needed = needed_by(program_, wait);
    node.waits[w].target = target;
    if (target > 0 && needed_by(program_, node.waits[w]) == needed) {
      ++of.unchanged;
    } else {
      const std::vector<int32_t> later = delayed_by(index, wait);
      const auto still_earlier = [&](const HappensBefore& certain) {
        return std::ranges::all_of(later, [&](int32_t task) {
          return std::ranges::all_of(needed, [&](int32_t signaller) { return certain.certain(signaller, task); });
        });
      };
      bool implied = false;
      const bool found = caught([&](const HappensBefore& certain) { implied = still_earlier(certain); });
      ++(found ? of.caught : implied ? of.implied : of.missed);
    }
    node.waits[w] = wait;
  }

  // What a wait of this task is there to delay: the task itself; or where it only counts, at the sources that hear of
  // it, the tasks that read what was pushed, or if it is pulls that it waits for, their leaving the call.
  std::vector<int32_t> delayed_by(int32_t index, const Wait& wait) const {
    if (program_.nodes()[index].task.kind != TaskKind::notify) return {index};
    const bool pulls = program_.name(wait.counter).family == Counter::rows_pulled;
    const int32_t nodes = static_cast<int32_t>(program_.nodes().size());
    std::vector<int32_t> later;
    for (const Signal& signal : program_.nodes()[index].signals) {
      if (pulls) later.push_back(nodes + program_.name(signal.counter).rank);
      for (int32_t i = 0; i < nodes && !pulls; ++i) {
        for (const Wait& other : program_.nodes()[i].waits) {
          if (other.counter == signal.counter) later.push_back(i);
        }
      }
    }
    return later;
  }

  // `look` sees the order if the program still comes to its end.
  template <class Look>
  bool caught(Look look) {
    const Run result = run(program_, {});
    if (!result.deadlock.empty()) return true;
    const HappensBefore certain(program_, result.order);
    look(certain);
    return !accesses_.find_conflict(certain, result.order).empty();
  }

  JointProgram& program_;
  Accesses accesses_;
  std::vector<bool> read_;  // by some wait, of each counter
  std::map<std::string, Tally> tallies_;
};

}  // namespace

std::map<std::string, Tally> try_mutations(JointProgram& program) { return Mutations(program).try_all(); }

}  // namespace mok::verify
