// A training step of the layer, forward and backward, of all ranks of a group: its inputs, its memory on the device,
// and what it computes on virtual ranks.
#pragma once

#include <cmath>
#include <memory>
#include <random>

#include "cuda/runtime/device.h"
#include "cuda/runtime/launch.h"
#include "cuda/runtime/report.h"
#include "cuda/test/harness.cuh"

namespace mok::cuda::test {

inline constexpr double kLimitS = 3;  // of a wait in a call, and of one for a peer to begin it

inline void check(const Error& error) {
  if (error) throw Failed(*error);
}

// Of a group with 8 experts and so many tokens. Rows are of several macrobatches.
inline Shape shape_of_group(int64_t ranks, int64_t tokens, int64_t top_k, int64_t hidden, int64_t intermediate) {
  return {.ranks = ranks,
          .rank = 0,
          .tokens = tokens / ranks,
          .top_k = top_k,
          .hidden_size = hidden,
          .intermediate_size = intermediate,
          .local_experts = 8 / ranks,
          .ring_rows = 2 * kRowBlock,
          .minibatch_rows = kRowBlock};
}

// Of a step: each array has all ranks, one after the other.
struct Results {
  std::vector<bf16> y, dx, wi_0_grad, wi_1_grad, wo_grad;
  std::vector<float> router_grads;
  std::vector<int32_t> expert_rows, bad_tokens;
};

template <class T>
std::string differences(const char* name, const std::vector<T>& actual, const std::vector<T>& expected, int64_t ranks) {
  const size_t of_rank = expected.size() / ranks;
  try {
    expect_equal(actual, expected, [&](size_t i) {
      return "in rank " + std::to_string(i / of_rank) + ", element " + std::to_string(i % of_rank);
    });
    return "";
  } catch (const Failed& failure) {
    return std::string(name) + ": " + failure.what() + "; ";
  }
}

inline void expect_same(const Results& actual, const Results& expected, int64_t ranks) {
  const std::string all = differences("y", actual.y, expected.y, ranks) +
                          differences("expert_rows", actual.expert_rows, expected.expert_rows, ranks) +
                          differences("bad_tokens", actual.bad_tokens, expected.bad_tokens, ranks) +
                          differences("dx", actual.dx, expected.dx, ranks) +
                          differences("router_grads", actual.router_grads, expected.router_grads, ranks) +
                          differences("wi_0_grad", actual.wi_0_grad, expected.wi_0_grad, ranks) +
                          differences("wi_1_grad", actual.wi_1_grad, expected.wi_1_grad, ranks) +
                          differences("wo_grad", actual.wo_grad, expected.wo_grad, ranks);
  if (!all.empty()) throw Failed(all);
}

// Of one rank's part.
template <class T>
void expect_nan(const char* name, const std::vector<T>& values, int64_t rank, int64_t ranks) {
  const size_t size = values.size() / ranks, begin = rank * size;
  size_t numbers = 0;
  for (size_t i = begin; i < begin + size; ++i) numbers += !std::isnan(static_cast<float>(values[i]));
  if (numbers == 0) return;
  throw Failed(std::string(name) + " of rank " + std::to_string(rank) + ", whose call has failed: " +
               std::to_string(numbers) + " of " + std::to_string(size) + " elements are not NaN");
}

inline void expect_nan(const Results& results, int64_t rank, int64_t ranks) {
  expect_nan("y", results.y, rank, ranks);
  expect_nan("dx", results.dx, rank, ranks);
  expect_nan("router_grads", results.router_grads, rank, ranks);
  expect_nan("wi_0_grad", results.wi_0_grad, rank, ranks);
  expect_nan("wi_1_grad", results.wi_1_grad, rank, ranks);
  expect_nan("wo_grad", results.wo_grad, rank, ranks);
}

class Step {
 public:
  // Calls of all ranks, without peers. Each rank's arrays are its part of these.
  ForwardCall forward;
  BackwardCall backward;

  explicit Step(const Shape& s) : shape(s), random_(s.tokens * s.hidden_size) {
    const int64_t n = s.ranks, weights = s.experts() * s.hidden_size * s.intermediate_size;
    Call c{};
    c.shape = s;
    c.save = Save::pre_activations_and_rows;
    c.activation = Activation::swiglu;
    c.activation_limit = INFINITY;
    c.timeout_s = c.entry_timeout_s = kLimitS;
    c.ranks_here = static_cast<int32_t>(n);
    c.x = x_ = make<bf16>(inputs_, elements());
    c.expert_ids = ids_ = make<int32_t>(inputs_, n * s.slots());
    c.expert_weights = weights_ = make<float>(inputs_, n * s.slots());
    c.wi_0 = make<bf16>(normal(weights, s.hidden_size));
    c.wi_1 = make<bf16>(normal(weights, s.hidden_size));
    c.wo = make<bf16>(normal(weights, s.intermediate_size));
    c.row_table = make<RowSource>(written_, n * max_rows(s));
    c.expert_rows = make<int32_t>(written_, s.experts());
    make_forward(c);
    make_backward(c, weights);
    upload(0);
    prepare(s);
  }

  // Other tokens, routed otherwise. A quarter of the slots is for expert 1; some are empty, and a few tokens bad.
  void upload(uint64_t seed) {
    random_.seed(seed);
    std::vector<int32_t> ids;
    std::vector<float> weights;
    for (int64_t slot = 0; slot < shape.ranks * shape.slots(); ++slot) {
      const uint64_t draw = random_() % 100;
      const int64_t any = static_cast<int64_t>(random_() % shape.experts());
      const bool bad = slot / shape.top_k % 50 == 7 && slot % shape.top_k == 0;
      ids.push_back(static_cast<int32_t>(bad ? shape.experts() : draw < 5 ? -1 : draw < 30 ? 1 : any));
      weights.push_back(0.2f + static_cast<float>(random_() % 1000) / 1000);
    }
    copy(ids, ids_);
    copy(weights, weights_);
    copy(normal(elements(), 1), x_);
    copy(normal(elements(), 1), dy_);
  }

  // Nothing is written that a step must write.
  void clear() {
    for (const auto& [array, bytes] : written_) check(cudaMemset(array->data(), kUnwritten, bytes));
    check(cudaDeviceSynchronize());
  }

  Results results() const {
    const int64_t n = shape.ranks, weights = shape.experts() * shape.hidden_size * shape.intermediate_size;
    return {.y = host(forward.out, elements()),
            .dx = host(backward.out, elements()),
            .wi_0_grad = host(static_cast<const bf16*>(backward.wi_0_grad), weights),
            .wi_1_grad = host(static_cast<const bf16*>(backward.wi_1_grad), weights),
            .wo_grad = host(static_cast<const bf16*>(backward.wo_grad), weights),
            .router_grads = host(backward.router_grads, n * shape.slots()),
            .expert_rows = host(forward.expert_rows, shape.experts()),
            .bad_tokens = host(forward.bad_tokens, n)};
  }

  // What the step must compute, by one launch of all ranks on the whole device. Afterwards nothing of it is left.
  Results expected() {
    const Results results = run_on_virtual_ranks();
    clear();
    return results;
  }
  Results run_on_virtual_ranks() {
    clear();
    check(launch_forward(forward, nullptr));
    check(launch_backward(backward, nullptr));
    check(cudaDeviceSynchronize());
    check(failure_text());
    return results();
  }

  const Shape shape;  // of each rank

 private:
  struct Memory {
    std::unique_ptr<Array<uint8_t>> array;
    int64_t bytes;
  };

  template <class T>
  static T* make(std::vector<Memory>& of, int64_t count) {
    const int64_t bytes = count * static_cast<int64_t>(sizeof(T));
    of.push_back({std::make_unique<Array<uint8_t>>(bytes), bytes});
    return reinterpret_cast<T*>(of.back().array->data());
  }
  template <class T>
  T* make(const std::vector<T>& values) {
    T* to = make<T>(inputs_, values.size());
    copy(values, to);
    return to;
  }
  template <class T>
  static void copy(const std::vector<T>& values, T* to) {
    check(cudaMemcpy(to, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
  }
  template <class T>
  static std::vector<T> host(const T* from, int64_t count) {
    std::vector<T> values(count);
    check(cudaMemcpy(values.data(), from, count * sizeof(T), cudaMemcpyDeviceToHost));
    return values;
  }

  int64_t elements() const { return shape.ranks * shape.tokens * shape.hidden_size; }

  std::vector<bf16> normal(int64_t count, int64_t fan_in) {
    std::normal_distribution<float> distribution(0.f, 1 / std::sqrt(static_cast<float>(fan_in)));
    std::vector<bf16> values(count);
    for (bf16& value : values) value = bf16(distribution(random_));
    return values;
  }

  void make_forward(const Call& c) {
    const int64_t ring = shape.ranks * shape.ring_rows;
    static_cast<Call&>(forward) = c;
    forward.direction = Direction::forward;
    forward.out = make<bf16>(written_, elements());
    forward.bad_tokens = make<int32_t>(written_, shape.ranks);
    forward.pre_activations = make<bf16>(written_, ring * pre_activation_width(shape.intermediate_size));
    forward.rows = make<bf16>(written_, ring * shape.hidden_size);
    forward.hidden = make<bf16>(written_, ring * shape.intermediate_size);
    forward.workspace = make<uint8_t>(written_, shape.ranks * workspace_bytes(shape, shape.ranks));
  }
  void make_backward(const Call& c, int64_t weights) {
    const int64_t ring = shape.ranks * shape.ring_rows, h = shape.hidden_size, inner = shape.intermediate_size;
    BackwardCall& b = backward;
    static_cast<Call&>(b) = c;
    b.direction = Direction::backward;
    b.dy = dy_ = make<bf16>(inputs_, elements());
    b.out = make<bf16>(written_, elements());
    b.router_grads = make<float>(written_, shape.ranks * shape.slots());
    b.wi_0_grad = make<bf16>(written_, weights);
    b.wi_1_grad = make<bf16>(written_, weights);
    b.wo_grad = make<bf16>(written_, weights);
    b.saved_pre_activations = forward.pre_activations;
    b.saved_rows = forward.rows;
    b.rows = make<bf16>(written_, ring * h);
    b.pre_activations = make<bf16>(written_, ring * pre_activation_width(inner));
    b.grads = make<bf16>(written_, ring * h);
    b.hidden = make<bf16>(written_, ring * inner);
    b.gate_up_grads = make<bf16>(written_, ring * 2 * inner);
    b.row_weights = make<float>(written_, ring);
    b.router_parts = make<float>(written_, ring * router_parts_width(inner));
    b.straddle = make<float>(written_, shape.ranks * straddle_elements(h, inner));
    b.workspace = make<uint8_t>(written_, shape.ranks * workspace_bytes(shape, shape.ranks));
  }

  std::mt19937_64 random_;
  std::vector<Memory> inputs_, written_;
  bf16 *x_, *dy_;
  int32_t* ids_;
  float* weights_;
};

}  // namespace mok::cuda::test
