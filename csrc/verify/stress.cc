// Stress test of the CPU executor, to be compiled with a sanitizer: ranks and workers as threads, random delays, rings
// so small that tokens flow through in many macrobatches, up to a rack of ranks. Every schedule must give the bits of
// the first one; rings are poisoned with NaN before each call. Ends with the failure of one rank, which must reach all.
#include <cstdio>
#include <cstring>
#include <limits>
#include <random>
#include <thread>

#include "host/executor.h"
#include "host/timeline.h"

namespace mok::verify {
namespace {

using host::BFloat16;

struct Sizes {
  const char* name;
  int64_t ranks, tokens, top_k, hidden_size, intermediate_size, local_experts;
  double share_of_first;  // of all slots, to expert 0: so many rows that they go through many macrobatches
};

struct Schedule {
  Save save;
  int64_t ring_rows;  // 0: all that can arrive
  int64_t minibatch_rows;
  int32_t communication_workers, compute_workers;
  uint64_t delay_seed;
};

template <class T>
T poison() {
  return host::from_float<T>(std::numeric_limits<float>::quiet_NaN());
}

template <class T>
std::vector<T> random_values(int64_t count, float scale, uint32_t seed) {
  std::minstd_rand random(seed);
  std::vector<T> values(count);
  for (T& value : values) {
    value = host::from_float<T>(scale * (static_cast<float>(random() % 2001) / 1000.f - 1.f));
  }
  return values;
}

// Inputs of one rank.
template <class T>
struct RankInputs {
  std::vector<T> x, dy, wi_0, wi_1, wo;
  std::vector<float> expert_weights;
  std::vector<int32_t> ids;

  RankInputs(const Sizes& s, uint32_t seed) : ids(s.tokens * s.top_k) {
    const int64_t matrix = s.local_experts * s.hidden_size * s.intermediate_size;
    x = random_values<T>(s.tokens * s.hidden_size, 1.f, seed);
    dy = random_values<T>(s.tokens * s.hidden_size, 1.f, seed + 1);
    wi_0 = random_values<T>(matrix, .1f, seed + 2);
    wi_1 = random_values<T>(matrix, .1f, seed + 3);
    wo = random_values<T>(matrix, .1f, seed + 4);
    expert_weights = random_values<float>(s.tokens * s.top_k, 1.f, seed + 5);
    std::minstd_rand random(seed + 6);
    for (int32_t& id : ids) {
      const bool first = static_cast<double>(random() % 1000) < 1000 * s.share_of_first;
      id = first ? 0 : static_cast<int32_t>(random() % (s.ranks * s.local_experts + 1)) - 1;
    }
  }
};

// What a step gives on one rank, as bytes.
struct Outputs {
  std::vector<std::byte> bytes;

  template <class V>
  void add(const std::vector<V>& values) {
    const auto* begin = reinterpret_cast<const std::byte*>(values.data());
    bytes.insert(bytes.end(), begin, begin + values.size() * sizeof(V));
  }
};

// A rank's memory in one step: forward, then backward.
template <class T>
class RankStep {
 public:
  RankStep(const Sizes& sizes, const Schedule& schedule, int64_t rank, const RankInputs<T>& inputs)
      : schedule_(schedule),
        shape_{.ranks = sizes.ranks,
               .rank = rank,
               .tokens = sizes.tokens,
               .top_k = sizes.top_k,
               .hidden_size = sizes.hidden_size,
               .intermediate_size = sizes.intermediate_size,
               .local_experts = sizes.local_experts,
               .ring_rows = schedule.ring_rows,
               .minibatch_rows = schedule.minibatch_rows},
        inputs_(inputs) {
    if (shape_.ring_rows == 0) shape_.ring_rows = max_rows(shape_);
    row_table_.resize(max_rows(shape_));
    expert_rows_.resize(shape_.local_experts);
    const int64_t matrix = shape_.local_experts * shape_.hidden_size * shape_.intermediate_size;
    y_.assign(shape_.tokens * shape_.hidden_size, poison<T>());
    dx_ = y_;
    router_grads_.assign(shape_.slots(), poison<float>());
    for (auto* grad : {&wi_0_grad_, &wi_1_grad_, &wo_grad_}) grad->assign(matrix, poison<float>());
  }

  // Returns what went wrong, or nothing.
  std::optional<std::string> run(int64_t first_call, double entry_timeout_s) {
    if (auto error = forward(first_call, entry_timeout_s)) return error;
    return backward(first_call + 1, entry_timeout_s);
  }

  Outputs outputs() const {
    Outputs all;
    all.add(y_);
    all.add(dx_);
    all.add(router_grads_);
    all.add(wi_0_grad_);
    all.add(wi_1_grad_);
    all.add(wo_grad_);
    return all;
  }

 private:
  template <class V = T>
  std::vector<V> ring(int64_t columns) const {
    return std::vector<V>(shape_.ring_rows * columns, poison<V>());
  }

  host::Call<T> call(Direction direction) {
    host::Call<T> c{};
    c.direction = direction;
    c.shape = shape_;
    c.save = schedule_.save;
    c.activation = {Activation::swiglu, std::numeric_limits<float>::infinity()};
    c.inputs = {.x = inputs_.x.data(),
                .dy = direction == Direction::backward ? inputs_.dy.data() : nullptr,
                .expert_ids = inputs_.ids.data(),
                .expert_weights = inputs_.expert_weights.data()};
    c.routing = {.row_table = row_table_.data(),
                 .expert_rows = expert_rows_.data(),
                 .bad_tokens = direction == Direction::forward ? &bad_tokens_ : nullptr};
    c.buffers.wi_0 = inputs_.wi_0.data();
    c.buffers.wi_1 = inputs_.wi_1.data();
    c.buffers.wo = inputs_.wo.data();
    return c;
  }

  std::optional<std::string> execute(const host::Call<T>& c, int64_t number, double entry_timeout_s) const {
    const auto group = host::Groups::instance().join({.call_site = 0, .run = number, .group = 0}, shape_.rank,
                                                     shape_.ranks, ArenaLayout(shape_, sizeof(T)).bytes);
    const host::Options options{.communication_workers = schedule_.communication_workers,
                                .compute_workers = schedule_.compute_workers,
                                .delay_seed = schedule_.delay_seed,
                                .entry_timeout_s = entry_timeout_s,
                                .timeout_s = 60};
    return host::execute(c, *group, options);
  }

  std::optional<std::string> forward(int64_t number, double entry_timeout_s) {
    host::Call<T> c = call(Direction::forward);
    rows_ = ring(shape_.hidden_size);
    pre_activations_ = ring(2 * shape_.intermediate_size);
    std::vector<T> hidden = ring(shape_.intermediate_size);
    c.buffers.rows = rows_.data();
    c.buffers.pre_activations = schedule_.save == Save::nothing ? nullptr : pre_activations_.data();
    c.buffers.hidden = hidden.data();
    c.buffers.out = y_.data();
    return execute(c, number, entry_timeout_s);
  }

  std::optional<std::string> backward(int64_t number, double entry_timeout_s) {
    host::Call<T> c = call(Direction::backward);
    std::vector<T> rows = ring(shape_.hidden_size), grads = ring(shape_.hidden_size),
                   hidden = ring(shape_.intermediate_size);
    std::vector<T> pre_activations = ring(2 * shape_.intermediate_size),
                   gate_up_grads = ring(2 * shape_.intermediate_size);
    std::vector<float> row_weights = ring<float>(1);
    std::vector<float> router_parts = ring<float>(host::tile_counts(shape_).hidden_grad);
    std::vector<float> straddle(3 * shape_.hidden_size * shape_.intermediate_size, poison<float>());
    host::Buffers<T>& b = c.buffers;
    b.rows = rows.data();
    b.grads = grads.data();
    b.pre_activations = pre_activations.data();
    b.hidden = hidden.data();
    b.gate_up_grads = gate_up_grads.data();
    b.row_weights = row_weights.data();
    b.router_parts = router_parts.data();
    b.straddle = straddle.data();
    b.saved_pre_activations = schedule_.save == Save::nothing ? nullptr : pre_activations_.data();
    b.saved_rows = schedule_.save == Save::pre_activations_and_rows ? rows_.data() : nullptr;
    b.out = dx_.data();
    b.router_grads = router_grads_.data();
    b.wi_0_grad = wi_0_grad_.data();
    b.wi_1_grad = wi_1_grad_.data();
    b.wo_grad = wo_grad_.data();
    b.grads_in_f32 = true;
    return execute(c, number, entry_timeout_s);
  }

  Schedule schedule_;
  Shape shape_;
  const RankInputs<T>& inputs_;
  std::vector<RowSource> row_table_;
  std::vector<int32_t> expert_rows_;
  int32_t bad_tokens_ = 0;
  std::vector<T> rows_, pre_activations_;  // what the forward saves
  std::vector<T> y_, dx_;
  std::vector<float> router_grads_, wi_0_grad_, wi_1_grad_, wo_grad_;
};

int64_t next_call = 0;

// One step of ranks [first, all): fewer than all if some are to be missing. Returns each rank's error.
template <class T>
std::vector<std::optional<std::string>> step(std::vector<RankStep<T>>& ranks, size_t first, double entry_timeout_s) {
  std::vector<std::optional<std::string>> errors(ranks.size());
  std::vector<std::thread> threads;
  for (size_t r = first; r < ranks.size(); ++r) {
    threads.emplace_back([&, r] { errors[r] = ranks[r].run(next_call, entry_timeout_s); });
  }
  for (std::thread& thread : threads) thread.join();
  next_call += 2;
  return errors;
}

template <class T>
bool same_bits(const Sizes& sizes, const std::vector<Schedule>& schedules) {
  std::vector<RankInputs<T>> inputs;
  for (int64_t r = 0; r < sizes.ranks; ++r) inputs.emplace_back(sizes, 100 * static_cast<uint32_t>(r) + 1);
  std::vector<Outputs> expected;
  for (size_t n = 0; n < schedules.size(); ++n) {
    std::vector<RankStep<T>> ranks;
    for (int64_t r = 0; r < sizes.ranks; ++r) ranks.emplace_back(sizes, schedules[n], r, inputs[r]);
    if (n > 0) host::Timeline::instance().start();
    for (const auto& error : step(ranks, 0, 60)) {
      if (!error) continue;
      std::printf("%s, schedule %zu: %s\n", sizes.name, n, error->c_str());
      return false;
    }
    if (host::Timeline::instance().take().empty() != (n == 0)) {
      std::printf("%s, schedule %zu: tasks are recorded only if they should not be\n", sizes.name, n);
      return false;
    }
    for (int64_t r = 0; r < sizes.ranks; ++r) {
      if (n == 0) expected.push_back(ranks[r].outputs());
      if (ranks[r].outputs().bytes == expected[r].bytes) continue;
      std::printf("%s, schedule %zu, rank %d: other bits\n", sizes.name, n, static_cast<int>(r));
      return false;
    }
  }
  std::printf("%s: %zu schedules agree\n", sizes.name, schedules.size());
  return true;
}

// Rank 0 never comes: every other one must return an error, and the next call must work.
bool failure_reaches_all(const Sizes& sizes) {
  const Schedule schedule{Save::pre_activations, 0, kRowBlock, 1, 1, 0};
  std::vector<RankInputs<float>> inputs;
  std::vector<RankStep<float>> ranks;
  for (int64_t r = 0; r < sizes.ranks; ++r) inputs.emplace_back(sizes, static_cast<uint32_t>(r));
  for (int64_t r = 0; r < sizes.ranks; ++r) ranks.emplace_back(sizes, schedule, r, inputs[r]);
  const auto errors = step(ranks, 1, .2);
  for (size_t r = 1; r < errors.size(); ++r) {
    if (errors[r] && errors[r]->find("entry_timeout_s") != std::string::npos) continue;
    std::printf("rank %zu did not hear of the failure\n", r);
    return false;
  }
  for (const auto& error : step(ranks, 0, 60)) {
    if (!error) continue;
    std::printf("after a failure: %s\n", error->c_str());
    return false;
  }
  std::printf("a failure reaches all ranks\n");
  return true;
}

bool stress() {
  constexpr auto kNothing = Save::nothing, kSome = Save::pre_activations, kAll = Save::pre_activations_and_rows;
  const std::vector<Schedule> few_ranks = {{kSome, 0, 8 * kRowBlock, 1, 1, 0},
                                           {kSome, kRowBlock, kRowBlock, 2, 3, 1},
                                           {kNothing, 2 * kRowBlock, kRowBlock, 1, 4, 2},
                                           {kAll, 4 * kRowBlock, 2 * kRowBlock, 3, 2, 3},
                                           {kNothing, kRowBlock, kRowBlock, 1, 1, 4},
                                           {kSome, 2 * kRowBlock, kRowBlock, 4, 8, 5}};
  // With experts of two blocks and a ring of three, every second macrobatch ends within an expert.
  const std::vector<Schedule> ring_of_three = {{kSome, 0, kRowBlock, 1, 1, 0},
                                               {kSome, 3 * kRowBlock, kRowBlock, 2, 4, 8},
                                               {kSome, 3 * kRowBlock, kRowBlock, 2, 8, 9}};
  const std::vector<Schedule> rack = {
      {kSome, 0, kRowBlock, 1, 1, 0}, {kSome, kRowBlock, kRowBlock, 1, 1, 6}, {kAll, kRowBlock, kRowBlock, 1, 2, 7}};
  bool good = true;
  good &= same_bits<float>({"one rank", 1, 300, 3, 24, 40, 5, .4}, few_ranks);
  good &= same_bits<float>({"one rank, experts in pieces", 1, 360, 5, 24, 40, 8, 0}, ring_of_three);
  good &= same_bits<BFloat16>({"two ranks, several tiles", 2, 50, 3, 264, 264, 3, .5}, few_ranks);
  good &= same_bits<float>({"three ranks", 3, 150, 3, 40, 24, 3, .6}, few_ranks);
  good &= same_bits<BFloat16>({"eight ranks", 8, 33, 4, 16, 16, 2, .3}, few_ranks);
  good &= same_bits<float>({"rack", 72, 3, 2, 8, 8, 2, .5}, rack);
  good &= same_bits<BFloat16>({"rack", 72, 2, 3, 16, 8, 1, .8}, rack);
  good &= failure_reaches_all({"", 4, 9, 2, 8, 8, 2, .2});
  return good;
}

}  // namespace
}  // namespace mok::verify

int main() { return mok::verify::stress() ? 0 : 1; }
