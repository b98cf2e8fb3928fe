// The schedule kernel alone, on virtual ranks: what it makes is what csrc/moe says, whatever the number of CTAs and of
// chunks; it ends beside a kernel that holds almost the whole device; and it leaves where a call has failed.
#include "cuda/test/schedule_ranks.cuh"
#include "cuda/test/spinning.cuh"

namespace mok::cuda::test {
namespace {

// Adds to a failure what was being tried.
template <class Try>
void named(const std::string& what, const Try& attempt) {
  try {
    attempt();
  } catch (const Failed& failure) {
    throw Failed(what + ": " + failure.what());
  }
}

std::string text_of(const Shape& s, Direction direction) {
  return std::string(direction == Direction::forward ? "forward" : "backward") + ", " + std::to_string(s.ranks) +
         " ranks, T " + std::to_string(s.tokens) + ", K " + std::to_string(s.top_k) + ", E_local " +
         std::to_string(s.local_experts);
}

// tokens, top_k, local experts, hidden
constexpr int64_t kShapes[][4] = {{1, 1, 1, 8},      {1, 3, 5, 16},    {41, 3, 3, 136},
                                  {1000, 8, 16, 64}, {777, 5, 200, 8}, {20011, 4, 8, 8}};

template <class R>
void run_all_grids(const Shape& s) {
  Ranks<R> ranks(s);
  const int32_t all = ranks.all_ctas();
  for (int32_t ctas : {1, 2, 7, all}) {
    for (int32_t chunks : {1, 3, all, static_cast<int32_t>(kMaxScheduleChunks)}) {
      named(text_of(s, R::kDirection) + ", " + std::to_string(ctas) + " CTAs, " + std::to_string(chunks) + " chunks",
            [&] {
              ranks.prepare();
              ranks.launch(ctas, chunks);
              check(cudaDeviceSynchronize());
              ranks.expect_all();
            });
    }
  }
}

// Chunks are more than CTAs, as many, and fewer.
TEST(grids) {
  for (int64_t n : {1, 2, 4}) {
    for (const auto& [tokens, top_k, experts, hidden] : kShapes) {
      const Shape s = shape_of(n, tokens, top_k, experts, hidden);
      run_all_grids<ForwardRank>(s);
      run_all_grids<BackwardRank>(s);
    }
  }
}

// ---- Beside a kernel that does not end.

template <class R>
void run_beside_spinning(const Shape& s) {
  Ranks<R> ranks(s);
  ranks.prepare();
  ranks.launch(ranks.all_ctas(), ranks.all_ctas());  // loads the kernel, which cannot be done beside one that spins
  check(cudaDeviceSynchronize());
  int resident;
  check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, schedule_kernel(R::kDirection), schedule_threads(),
                                                      ranks.shared_bytes()));
  ranks.prepare();
  Stream stream;
  Spinning spinning(static_cast<int32_t>(ceil_div(s.ranks, resident)), schedule_threads(), ranks.shared_bytes());
  ranks.launch(ranks.all_ctas(), ranks.all_ctas(), stream);
  const bool ended = stream.ends(5);
  if (!spinning.stop()) throw Failed("the spinning kernel ran out of time, so that nothing is known");
  if (!ended) throw Failed("the schedule kernel did not end beside a kernel that holds all other multiprocessors");
  check(cudaDeviceSynchronize());
  ranks.expect_all();
}

TEST(beside_a_spinning_kernel) {
  for (int64_t n : {1, 2, 4}) {
    for (const auto& [tokens, top_k, experts, hidden] : kShapes) {
      const Shape s = shape_of(n, tokens, top_k, experts, hidden);
      named(text_of(s, Direction::forward), [&] { run_beside_spinning<ForwardRank>(s); });
      named(text_of(s, Direction::backward), [&] { run_beside_spinning<BackwardRank>(s); });
    }
  }
}

// ---- Calls that fail.

template <class R>
void run_failed(const Shape& s) {
  Ranks<R> ranks(s);
  for (int32_t ctas : {1, ranks.all_ctas()}) {
    ranks.prepare(30'000'000'000, {.code = static_cast<int32_t>(FailureCode::timeout)});
    ranks.launch(ctas, ranks.all_ctas());
    check(cudaDeviceSynchronize());
    ranks.expect_no_rows();
    ranks.expect_no_schedule();
  }
}

TEST(a_call_after_a_failure) {
  const Shape s = shape_of(2, 1000, 8, 16, 64);
  named("forward", [&] { run_failed<ForwardRank>(s); });
  named("backward", [&] { run_failed<BackwardRank>(s); });
}

template <class R>
void run_without_peer(const Shape& s, int32_t ctas) {
  Ranks<R> ranks(s);
  ranks.prepare(20'000'000);
  ranks.launch(ctas, ranks.all_ctas(), 1);
  check(cudaDeviceSynchronize());
  ranks.expect_no_rows();
  const Failure& failure = ranks.failure();
  expect_equal<int32_t>({failure.code, failure.rank, failure.task, failure.counter},
                        {static_cast<int32_t>(FailureCode::entry_timeout), 0, -1, 1});
}

TEST(a_peer_that_does_not_come) {
  const Shape s = shape_of(2, 1000, 8, 16, 64);
  for (int32_t ctas : {1, 2, multiprocessors()}) {
    named("forward", [&] { run_without_peer<ForwardRank>(s, ctas); });
    named("backward", [&] { run_without_peer<BackwardRank>(s, ctas); });
  }
}

// What a call reports of which rank 0 is changed. All end it early, since virtual ranks are of one device.
template <class R, class Change>
Failure run_changed(Ranks<R>& ranks, const Change& change) {
  ranks.prepare();
  ranks.change_first(change);
  ranks.launch(ranks.all_ctas(), ranks.all_ctas());
  check(cudaDeviceSynchronize());
  ranks.expect_no_rows();
  return ranks.failure();
}

template <class R, class Change>
void expect_failure(FailureCode code, int32_t counter, const Change& change) {
  Ranks<R> ranks(shape_of(2, 1000, 8, 16, 64));
  const Failure failure = run_changed(ranks, change);
  expect_equal<int32_t>({failure.code, failure.counter}, {static_cast<int32_t>(code), counter});
}

// Either rank may be the first to see that the other means another call.
TEST(ranks_in_different_calls) {
  Ranks<ForwardRank> ranks(shape_of(2, 1000, 8, 16, 64));
  const Failure failure = run_changed(ranks, [](auto& rank, Meeting&) { rank.hash = 7; });
  ranks.expect_no_schedule();
  expect_equal<int32_t>({failure.code, failure.counter},
                        {static_cast<int32_t>(FailureCode::disagreement), 1 - failure.rank});
}

TEST(a_rank_in_two_calls) {
  const auto change = [](auto&, Meeting& met) { met.progress.busy = 1; };
  expect_failure<ForwardRank>(FailureCode::concurrent, -1, change);
  expect_failure<BackwardRank>(FailureCode::concurrent, -1, change);
}

TEST(a_rank_in_another_place) {
  const Array<int32_t> where(std::vector<int32_t>{1, 0});
  const auto change = [&](auto& rank, Meeting&) { rank.where = where.data(); };
  expect_failure<ForwardRank>(FailureCode::misplaced, 1, change);
  expect_failure<BackwardRank>(FailureCode::misplaced, 1, change);
}

}  // namespace
}  // namespace mok::cuda::test

int main(int argc, char** argv) { return mok::cuda::test::run(argc, argv); }
