// Several ranks on one GPU, each with launches of its own on a stream of its own, as on GPUs of their own: they find
// each other through meetings and arenas alone. Their results are the bits of virtual ranks; they wait for a rank that
// is late; and where one does not come, or means another call, all of them end and stay so.
#include <cstdlib>
#include <thread>

#include "cuda/test/stream_ranks.cuh"

namespace mok::cuda::test {
namespace {

constexpr double kSoonS = 5;  // in which what waits for nobody ends, also where other programs share the GPU

Shape small(int64_t ranks) { return shape_of_group(ranks, 320, 3, 136, 200); }
Shape large(int64_t ranks) { return shape_of_group(ranks, 800, 4, 264, 328); }

// ---- Calls that succeed.

void expect_success(const Group& group, const Clock& clock, double limit_s) {
  group.expect_end(clock, limit_s);
  group.expect_no_failure();
}

// Calls of several layers in a row: all forwards, and all backwards in the opposite order.
class Layers {
 public:
  Layers(int64_t ranks, int32_t communication_ctas) : ranks_(ranks) {
    for (const Shape& s : {small(ranks), large(ranks), small(ranks), small(ranks), large(ranks), small(ranks)}) {
      steps_.push_back(std::make_unique<Step>(s));
      steps_.back()->forward.communication_ctas = steps_.back()->backward.communication_ctas = communication_ctas;
    }
  }

  void make_arenas(Group& group) const {
    for (const auto& step : steps_) group.make_arenas(step->shape);
  }
  void upload(uint64_t seed) {
    expected_.clear();
    for (const auto& step : steps_) {
      step->upload(seed++);
      expected_.push_back(step->expected());
    }
  }
  // visit(call) of each.
  template <class Visit>
  void for_each_call(const Visit& visit) const {
    for (const auto& step : steps_) visit(step->forward);
    for (size_t i = steps_.size(); i-- > 0;) visit(steps_[i]->backward);
  }
  void expect_results() const {
    for (size_t i = 0; i < steps_.size(); ++i) {
      named("layer " + std::to_string(i), [&] { expect_same(steps_[i]->results(), expected_[i], ranks_); });
    }
  }

 private:
  const int64_t ranks_;
  std::vector<std::unique_ptr<Step>> steps_;
  std::vector<Results> expected_;
};

// The host goes call by call, or rank by rank.
void launch_all(Group& group, int64_t ranks, const Layers& layers, bool by_call) {
  if (by_call) {
    layers.for_each_call([&](const auto& call) {
      for (int64_t r = 0; r < ranks; ++r) group.launch(call, r);
    });
    return;
  }
  for (int64_t r = ranks - 1; r >= 0; --r) {
    layers.for_each_call([&](const auto& call) { group.launch(call, r); });
  }
}

void run_in_a_row(int64_t ranks, int32_t communication_ctas) {
  Layers layers(ranks, communication_ctas);
  Group group(ranks);
  layers.make_arenas(group);
  for (uint64_t round = 0; round < 6; ++round) {
    layers.upload(100 * round);
    named("round " + std::to_string(round), [&] {
      const Clock clock;
      launch_all(group, ranks, layers, round % 2 == 0);
      expect_success(group, clock, 4 * kLimitS);
      layers.expect_results();
    });
  }
}

TEST(calls_in_a_row) {
  Cases cases;
  for (int64_t ranks : {2, 4}) {
    for (int32_t ctas : {0, 2}) {
      cases.run(std::to_string(ranks) + " ranks, " + std::to_string(ctas) + " communication CTAs",
                [&] { run_in_a_row(ranks, ctas); });
    }
  }
  cases.expect_none_failed();
}

void run_late(int64_t ranks, int64_t late) {
  Step step(small(ranks));
  const Results expected = step.expected();
  Group group(ranks);
  group.make_arenas(step.shape);
  const auto launch = [&](int64_t r) {
    group.launch(step.forward, r);
    group.launch(step.backward, r);
  };
  const Clock clock;
  for (int64_t r = 0; r < ranks; ++r) {
    if (r != late) launch(r);
  }
  std::this_thread::sleep_for(std::chrono::seconds(1));
  launch(late);
  expect_success(group, clock, 1 + kLimitS);
  expect_same(step.results(), expected, ranks);
}

TEST(a_late_rank) {
  Cases cases;
  for (int64_t ranks : {2, 4}) {
    for (int64_t late : {int64_t{0}, ranks - 1}) {
      cases.run(std::to_string(ranks) + " ranks, rank " + std::to_string(late) + " late",
                [&] { run_late(ranks, late); });
    }
  }
  cases.expect_none_failed();
}

// Runs a step with other tokens; launch(rank) launches both directions.
template <class Launch>
void run_once(const Group& group, Step& step, uint64_t seed, const Launch& launch) {
  step.upload(seed);
  const Results expected = step.expected();
  const Clock clock;
  for (int64_t r = 0; r < step.shape.ranks; ++r) launch(r);
  expect_success(group, clock, kLimitS);
  expect_same(step.results(), expected, step.shape.ranks);
}

void run_between_graphs(int64_t ranks) {
  Step captured(small(ranks)), plain(large(ranks));
  Group group(ranks);
  const auto launch = [&](const Step& step, int64_t r) {
    group.launch(step.forward, r);
    group.launch(step.backward, r);
  };
  group.make_arenas(captured.shape);
  std::vector<std::unique_ptr<Graph>> graphs;
  for (int64_t r = 0; r < ranks; ++r) {
    graphs.push_back(std::make_unique<Graph>(stream_of(r), [&] { launch(captured, r); }));
  }
  const auto replay = [&](int64_t r) { graphs[r]->launch(); };
  named("the graphs at first", [&] { run_once(group, captured, 1, replay); });
  group.make_arenas(plain.shape);
  for (uint64_t seed = 2; seed < 6; ++seed) {
    const std::string with = " with tokens " + std::to_string(seed);
    named("the larger shape" + with, [&] { run_once(group, plain, seed, [&](int64_t r) { launch(plain, r); }); });
    named("the graphs" + with, [&] { run_once(group, captured, seed, replay); });
    named("the graphs again" + with, [&] { run_once(group, captured, 100 + seed, replay); });
  }
}

TEST(a_larger_shape_between_graphs) {
  Cases cases;
  for (int64_t ranks : {2, 4}) {
    cases.run(std::to_string(ranks) + " ranks", [&] { run_between_graphs(ranks); });
  }
  cases.expect_none_failed();
}

// ---- Calls that fail.

// Every rank's failure is one of those that `is_right` allows it.
template <class IsRight>
void expect_failures(const Group& group, int64_t ranks, const Clock& clock, const IsRight& is_right) {
  for (int64_t r = 0; r < ranks; ++r) {
    if (!is_right(r, group.code(r))) throw Failed("after " + clock.text() + ", " + group.failures());
  }
}
// And of at least one rank it is this, because of this peer.
void expect_one(const Group& group, int64_t ranks, FailureCode code, int64_t peer) {
  for (int64_t r = 0; r < ranks; ++r) {
    if (group.code(r) == code && group.failure(r).counter == peer) return;
  }
  throw Failed("no rank has " + text_of(code) + " because of rank " + std::to_string(peer) + "; " + group.failures());
}

// A group in which a call has failed: following calls of any rank end at once, and all their results are NaN.
void expect_no_more_calls(Group& group, Step& step) {
  const int64_t ranks = step.shape.ranks;
  step.clear();
  named("calls after it", [&] {
    for (int64_t r = ranks - 1; r >= 0; --r) {
      const Clock clock;
      group.launch(step.forward, r);
      group.launch(step.backward, r);
      group.expect_end(clock, kSoonS);
    }
    const Results results = step.results();
    for (int64_t r = 0; r < ranks; ++r) {
      if (group.code(r) == FailureCode::none) throw Failed(group.failures());
      expect_nan(results, r, ranks);
    }
  });
}

// A forward has failed on all ranks but perhaps the last: their results are NaN, and there are no more calls.
void expect_lost(Group& group, Step& step) {
  const int64_t ranks = step.shape.ranks;
  const Results results = step.results();
  for (int64_t r = 0; r < ranks - 1; ++r) expect_nan("y", results.y, r, ranks);
  expect_no_more_calls(group, step);
}

// The last rank does not come, or comes only as far as into its schedule kernel, as one whose process ends.
void run_without_last(int64_t ranks, bool enters) {
  Step step(small(ranks));
  step.expected();
  Group group(ranks);
  group.make_arenas(step.shape);
  const Clock clock;
  for (int64_t r = 0; r < ranks - 1; ++r) group.launch(step.forward, r);
  if (enters) group.launch_schedule(step.forward, ranks - 1);
  group.expect_end(clock, kLimitS + kSoonS);
  const FailureCode first = enters ? FailureCode::timeout : FailureCode::entry_timeout;
  expect_failures(group, ranks - 1, clock, [&](int64_t r, FailureCode code) {
    if (code == FailureCode::cancelled) return group.failure(r).counter < ranks - 1;
    return code == first && (enters || group.failure(r).counter == ranks - 1);
  });
  if (!enters) expect_one(group, ranks, first, ranks - 1);
  expect_lost(group, step);
}

TEST(a_rank_that_does_not_come) {
  Cases cases;
  for (int64_t ranks : {2, 4}) {
    cases.run(std::to_string(ranks) + " ranks", [&] { run_without_last(ranks, false); });
  }
  cases.expect_none_failed();
}

TEST(a_rank_that_ends_in_the_middle) {
  Cases cases;
  for (int64_t ranks : {2, 4}) {
    cases.run(std::to_string(ranks) + " ranks", [&] { run_without_last(ranks, true); });
  }
  cases.expect_none_failed();
}

// What the last rank calls while all others call the forward of the small shape.
struct Other {
  const char* what;
  Shape shape;
  int64_t program;
  Direction direction;
  bool same_class;
};

std::vector<Other> others(int64_t ranks) {
  constexpr Direction kForward = Direction::forward;
  return {{"another program", small(ranks), 7, kForward, true},
          {"the backward", small(ranks), 0, Direction::backward, true},
          {"fewer tokens in the same class", shape_of_group(ranks, 316, 3, 136, 200), 0, kForward, true},
          {"more slots of a token in the same class", shape_of_group(ranks, 240, 4, 136, 200), 0, kForward, true},
          {"another I", shape_of_group(ranks, 320, 3, 136, 264), 0, kForward, true},
          {"a larger class", large(ranks), 0, kForward, false}};
}

void run_other(int64_t ranks, const Other& other, bool last_first) {
  Step step(small(ranks)), last(other.shape);
  if ((ArenaClass(step.shape, 2) == ArenaClass(last.shape, 2)) != other.same_class) throw Failed("of another class");
  last.run_on_virtual_ranks();  // a backward has its forward's tables
  step.expected();
  last.forward.program = other.program;
  Group group(ranks);
  group.make_arenas(step.shape);
  group.make_arenas(last.shape);
  const auto launch = [&](int64_t r) {
    if (r < ranks - 1) {
      group.launch(step.forward, r);
    } else if (other.direction == Direction::forward) {
      group.launch(last.forward, r);
    } else {
      group.launch(last.backward, r);
    }
  };
  const Clock clock;
  for (int64_t r = 0; r < ranks; ++r) launch(last_first ? ranks - 1 - r : r);
  group.expect_end(clock, kSoonS);
  expect_failures(group, ranks, clock, [&](int64_t, FailureCode code) {
    return code == FailureCode::disagreement || code == FailureCode::cancelled;
  });
  int64_t disagree = 0;
  for (int64_t r = 0; r < ranks; ++r) disagree += group.code(r) == FailureCode::disagreement;
  if (disagree == 0) throw Failed("no rank has told a disagreement; " + group.failures());
  expect_lost(group, step);
}

TEST(ranks_in_different_calls) {
  Cases cases;
  for (int64_t ranks : {2, 4}) {
    for (const Other& other : others(ranks)) {
      for (bool last_first : {false, true}) {
        cases.run(
            std::to_string(ranks) + " ranks, the last one in " + other.what + (last_first ? ", launched first" : ""),
            [&] { run_other(ranks, other, last_first); });
      }
    }
  }
  cases.expect_none_failed();
}

// The last rank's host finds an error before its schedule kernel or after it, early or when the others wait already.
void run_host_error(int64_t ranks, bool enters, bool late) {
  Step step(small(ranks));
  step.expected();
  Group group(ranks);
  group.make_arenas(step.shape);
  const Clock clock;
  for (int64_t r = 0; r < ranks - 1; ++r) group.launch(step.forward, r);
  if (enters) group.launch_schedule(step.forward, ranks - 1);
  if (late) std::this_thread::sleep_for(std::chrono::milliseconds(300));
  group.launch_abort(step.forward, ranks - 1);
  group.expect_end(clock, kSoonS);
  expect_failures(group, ranks, clock, [&](int64_t r, FailureCode code) {
    if (r == ranks - 1) return code == FailureCode::aborted;
    return code == FailureCode::cancelled && group.failure(r).counter == ranks - 1;
  });
  expect_lost(group, step);
}

TEST(a_host_error) {
  Cases cases;
  for (int64_t ranks : {2, 4}) {
    for (bool enters : {false, true}) {
      for (bool late : {false, true}) {
        cases.run(std::to_string(ranks) + " ranks" + (enters ? ", after the schedule" : "") + (late ? ", late" : ""),
                  [&] { run_host_error(ranks, enters, late); });
      }
    }
  }
  cases.expect_none_failed();
}

}  // namespace
}  // namespace mok::cuda::test

int main(int argc, char** argv) {
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);  // queues: streams must not wait for each other
  mok::cuda::test::watch(argc > 1 ? 50 * (argc - 1) : 300);
  return mok::cuda::test::run(argc, argv);
}
