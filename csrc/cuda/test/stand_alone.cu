// One training step of the layer, forward and backward, without JAX: straight through cuda/runtime, with as many
// virtual ranks as wanted. A smoke test where JAX is not, and small enough for compute-sanitizer.
//
// The same global inputs are run in every combination of the settings given, as often as wanted. All results must be
// the same bits, finite but for bad tokens, and right for some tokens that are computed here again.
//
//   stand_alone --ranks 1,2 --ring-rows 128,0 --comm-ctas 0,2 --save 0,1,2 --repeats 50 --poison 1
//
// Ring 0 holds every row that can arrive; save is an enum Save. timeout-us are limits of waits in the forward and in
// the backward. With --fails 1 (2) the first setting alone is run, and a wait of its forward (backward) must last
// longer than that, and all that depends on it be NaN. See Options for the others and what they are otherwise.
#include <cuda_runtime.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "cuda/runtime/device.h"
#include "cuda/runtime/launch.h"
#include "cuda/runtime/report.h"

namespace mok::cuda::test {
namespace {

using Numbers = std::vector<int64_t>;

struct Options {
  std::map<std::string, Numbers> values{
      {"ranks", {1, 2}},
      {"ring-rows", {128, 0}},
      {"comm-ctas", {0, 2}},
      {"save", {1}},
      {"tokens", {320}},
      {"top-k", {3}},
      {"hidden", {136}},
      {"intermediate", {200}},
      {"experts", {8}},
      {"minibatch-rows", {128}},
      {"reserve", {0}},
      {"repeats", {2}},
      {"poison", {0}},
      {"f32-grads", {0}},
      {"seed", {0}},
      {"fails", {0}},
      {"timeout-us", {30'000'000, 30'000'000}},
  };

  Options(int argc, char** argv) {
    for (int i = 1; i + 1 < argc; i += 2) {
      const std::string name = std::strncmp(argv[i], "--", 2) == 0 ? argv[i] + 2 : argv[i];
      if (!values.contains(name)) throw std::runtime_error("no such option: " + name);
      values[name].clear();
      std::istringstream words(argv[i + 1]);
      for (std::string word; std::getline(words, word, ',');) values[name].push_back(std::stoll(word));
    }
    if (argc % 2 == 0) throw std::runtime_error("an option without a value");
  }
  const Numbers& all(const std::string& name) const { return values.at(name); }
  int64_t one(const std::string& name) const { return values.at(name).at(0); }
};

void check(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}
void check(const Error& error) {
  if (error) throw std::runtime_error(*error);
}

// Device memory of exactly this size, so that a tool sees what is read or written beyond it.
class Memory {
 public:
  explicit Memory(int64_t bytes) : bytes_(bytes) {
    if (bytes > 0) check(cudaMalloc(&data_, bytes));
  }
  template <class T>
  explicit Memory(const std::vector<T>& values) : Memory(static_cast<int64_t>(values.size() * sizeof(T))) {
    check(cudaMemcpy(data_, values.data(), bytes_, cudaMemcpyHostToDevice));
  }
  Memory(const Memory&) = delete;
  ~Memory() { cudaFree(data_); }

  // All bits set: NaN where floats are, and -1 where integers are.
  void poison() const {
    if (bytes_ > 0) check(cudaMemset(data_, 0xff, bytes_));
  }
  template <class T>
  T* as() const {  // null where it is empty
    return static_cast<T*>(data_);
  }
  std::vector<uint8_t> host() const {
    std::vector<uint8_t> bytes(bytes_);
    check(cudaMemcpy(bytes.data(), data_, bytes_, cudaMemcpyDeviceToHost));
    return bytes;
  }

 private:
  int64_t bytes_;
  void* data_ = nullptr;
};

// Global inputs on the host. A quarter of the slots is for expert 1; some are empty, and a few tokens bad.
struct Inputs {
  int64_t tokens, top_k, hidden, intermediate, experts;
  std::vector<bf16> x, dy, wi_0, wi_1, wo;
  std::vector<int32_t> ids;
  std::vector<float> weights;

  explicit Inputs(const Options& o)
      : tokens(o.one("tokens")),
        top_k(o.one("top-k")),
        hidden(o.one("hidden")),
        intermediate(o.one("intermediate")),
        experts(o.one("experts")) {
    std::mt19937_64 random(o.one("seed"));
    std::normal_distribution<float> normal;
    const auto fill = [&](std::vector<bf16>& values, int64_t count, int64_t fan_in) {
      for (int64_t i = 0; i < count; ++i) values.push_back(bf16(normal(random) / std::sqrt(float(fan_in))));
    };
    fill(x, tokens * hidden, 1);
    fill(dy, tokens * hidden, 1);
    fill(wi_0, experts * hidden * intermediate, hidden);
    fill(wi_1, experts * hidden * intermediate, hidden);
    fill(wo, experts * intermediate * hidden, intermediate);
    for (int64_t slot = 0; slot < tokens * top_k; ++slot) {
      const uint64_t draw = random() % 100;
      const int64_t expert = draw < 5 ? -1 : draw < 30 ? 1 % experts : random() % experts;
      const bool wrong = slot / top_k % 50 == 7 && slot % top_k == 0;
      ids.push_back(static_cast<int32_t>(wrong ? experts : expert));
      weights.push_back(0.2f + static_cast<float>(random() % 1000) / 1000);
    }
  }

  bool bad(int64_t token) const {
    for (int64_t k = 0; k < top_k; ++k) {
      const int32_t id = ids[token * top_k + k];
      if (id < -1 || id >= experts) return true;
    }
    return false;
  }
};

constexpr double kEntryLimitS = 240;

struct Setting {
  int64_t ranks, ring_rows, comm_ctas, save;
  std::string text() const {
    return "ranks " + std::to_string(ranks) + ", ring " + std::to_string(ring_rows) + ", communication CTAs " +
           std::to_string(comm_ctas) + ", save " + std::to_string(save);
  }
};

// What a step computes: bytes by name.
using Results = std::map<std::string, std::vector<uint8_t>>;

// The layer with its memory. Sizes are those of csrc/ffi/buffers.h.
class Step {
 public:
  Step(const Inputs& in, const Options& o, const Setting& setting) {
    Shape s{.ranks = setting.ranks,
            .rank = 0,
            .tokens = in.tokens / setting.ranks,
            .top_k = in.top_k,
            .hidden_size = in.hidden,
            .intermediate_size = in.intermediate,
            .local_experts = in.experts / setting.ranks,
            .ring_rows = 0,
            .minibatch_rows = o.one("minibatch-rows")};
    if (in.tokens % s.ranks != 0 || in.experts % s.ranks != 0) throw std::runtime_error("ranks must divide all");
    s.ring_rows = setting.ring_rows > 0 ? smaller(setting.ring_rows, max_rows(s)) : max_rows(s);
    const int64_t n = s.ranks, ring = n * s.ring_rows, h = s.hidden_size, inner = s.intermediate_size;
    const Save save = static_cast<Save>(setting.save);
    const bool overflow = max_rows(s) > s.ring_rows;
    const int64_t pre_activations = ring * pre_activation_width(inner) * 2;
    const int64_t weight_bytes = in.experts * h * inner * (o.one("f32-grads") ? 4 : 2);
    const int64_t straddle = n * straddle_elements(h, inner) * 4;

    Call c{};
    c.shape = s;
    c.save = save;
    c.activation = Activation::swiglu;
    c.activation_limit = INFINITY;
    c.entry_timeout_s = kEntryLimitS;
    c.ranks_here = static_cast<int32_t>(n);
    c.communication_ctas = static_cast<int32_t>(setting.comm_ctas);
    c.reserved_sms = static_cast<int32_t>(o.one("reserve"));
    c.x = input(in.x);
    c.expert_ids = input(in.ids);
    c.expert_weights = input(in.weights);
    c.wi_0 = input(in.wi_0);
    c.wi_1 = input(in.wi_1);
    c.wo = input(in.wo);
    c.row_table = make<RowSource>("", n * max_rows(s) * sizeof(RowSource));
    c.expert_rows = make<int32_t>("expert_rows", in.experts * 4);

    ForwardCall& f = forward_;
    static_cast<Call&>(f) = c;
    f.timeout_s = 1e-6 * static_cast<double>(o.all("timeout-us").front());
    f.out = make<bf16>("y", in.tokens * h * 2);
    f.bad_tokens = make<int32_t>("", n * 4);
    f.pre_activations = make<bf16>("", save == Save::nothing ? 0 : pre_activations);
    f.rows = make<bf16>("", ring * h * 2);
    f.hidden = make<bf16>("", ring * inner * 2);
    f.workspace = make<uint8_t>("", n * workspace_bytes(s, n));

    BackwardCall& b = backward_;
    static_cast<Call&>(b) = c;
    b.timeout_s = 1e-6 * static_cast<double>(o.all("timeout-us").back());
    b.dy = input(in.dy);
    b.out = make<bf16>("dx", in.tokens * h * 2);
    b.router_grads = make<float>("router_grads", in.tokens * s.top_k * 4);
    b.wi_0_grad = make<void>("d_wi_0", weight_bytes);
    b.wi_1_grad = make<void>("d_wi_1", weight_bytes);
    b.wo_grad = make<void>("d_wo", weight_bytes);
    b.grads_in_f32 = o.one("f32-grads") != 0;
    b.saved_pre_activations = f.pre_activations;
    b.saved_rows = save == Save::pre_activations_and_rows ? f.rows : nullptr;
    b.rows = make<bf16>("", overflow || !b.saved_rows ? ring * h * 2 : 0);
    b.pre_activations = make<bf16>("", overflow || save == Save::nothing ? pre_activations : 0);
    b.grads = make<bf16>("", ring * h * 2);
    b.hidden = make<bf16>("", ring * inner * 2);
    b.gate_up_grads = make<bf16>("", ring * 2 * inner * 2);
    b.row_weights = make<float>("", ring * 4);
    b.router_parts = make<float>("", ring * router_parts_width(inner) * 4);
    b.straddle = make<float>("", overflow ? straddle : 0);
    b.workspace = make<uint8_t>("", n * workspace_bytes(s, n));
    prepare(s);
  }

  Results run(bool poison) {
    if (poison) {
      for (const auto& [name, memory] : written_) memory->poison();
    }
    check(launch_forward(forward_, nullptr));
    check(launch_backward(backward_, nullptr));
    check(cudaDeviceSynchronize());
    Results results;
    for (const auto& [name, memory] : written_) {
      if (!name.empty()) results[name] = memory->host();
    }
    return results;
  }

 private:
  template <class T>
  const T* input(const std::vector<T>& values) {
    inputs_.push_back(std::make_unique<Memory>(values));
    return inputs_.back()->as<T>();
  }
  // What a call writes; a result if it has a name.
  template <class T>
  T* make(const std::string& name, int64_t bytes) {
    written_.emplace_back(name, std::make_unique<Memory>(bytes));
    return written_.back().second->template as<T>();
  }

  ForwardCall forward_{};
  BackwardCall backward_{};
  std::vector<std::unique_ptr<Memory>> inputs_;
  std::vector<std::pair<std::string, std::unique_ptr<Memory>>> written_;
};

template <class T>
std::vector<double> as_numbers(const std::vector<uint8_t>& bytes) {
  std::vector<double> numbers(bytes.size() / sizeof(T));
  for (size_t i = 0; i < numbers.size(); ++i) {
    T value;
    std::memcpy(static_cast<void*>(&value), &bytes[i * sizeof(T)], sizeof(T));
    numbers[i] = static_cast<double>(static_cast<float>(value));
  }
  return numbers;
}

template <class T>
bool all_nan(const std::vector<uint8_t>& bytes) {
  for (double number : as_numbers<T>(bytes)) {
    if (!std::isnan(number)) return false;
  }
  return true;
}

// A failure was reported, and nothing that is computed from then on may be taken for a result.
void expect_failure(const Options& o, const Results& results) {
  const std::optional<std::string> text = failure_text();
  if (!text) throw std::runtime_error("no failure was reported");
  if (o.one("poison")) throw std::runtime_error("poisoned memory is NaN anyway");
  const bool f32 = o.one("f32-grads") != 0;
  bool nan = all_nan<bf16>(results.at("dx")) && all_nan<float>(results.at("router_grads"));
  nan = nan && all_nan<bf16>(results.at("y")) == (o.one("fails") == 1);
  for (const char* name : {"d_wi_0", "d_wi_1", "d_wo"}) {
    nan = nan && (f32 ? all_nan<float>(results.at(name)) : all_nan<bf16>(results.at(name)));
  }
  if (!nan) throw std::runtime_error("a result is not NaN");
  std::printf("all NaN, %s\n", text->c_str());
}

void expect_finite(const Inputs& in, const Options& o, const Results& results) {
  const auto check_all = [&](const std::string& name, const std::vector<double>& numbers, int64_t per_token) {
    for (size_t i = 0; i < numbers.size(); ++i) {
      const bool nan = per_token > 0 && in.bad(static_cast<int64_t>(i) / per_token);
      if (nan ? std::isnan(numbers[i]) : std::isfinite(numbers[i])) continue;
      throw std::runtime_error(name + "[" + std::to_string(i) + "] is " + std::to_string(numbers[i]));
    }
  };
  check_all("y", as_numbers<bf16>(results.at("y")), in.hidden);
  check_all("dx", as_numbers<bf16>(results.at("dx")), in.hidden);
  check_all("router_grads", as_numbers<float>(results.at("router_grads")), in.top_k);
  for (const char* name : {"d_wi_0", "d_wi_1", "d_wo"}) {
    const std::vector<uint8_t>& bytes = results.at(name);
    check_all(name, o.one("f32-grads") ? as_numbers<float>(bytes) : as_numbers<bf16>(bytes), 0);
  }
}

void expect_same(const Results& actual, const Results& expected) {
  for (const auto& [name, bytes] : expected) {
    if (actual.at(name) != bytes) throw std::runtime_error(name + " differs from the first run");
  }
}

double number(bf16 value) { return static_cast<double>(__bfloat162float(value)); }

// One slot's row of the layer: down(SwiGLU(x)).
std::vector<double> expert_row(const Inputs& in, int64_t token, int64_t expert) {
  const int64_t h = in.hidden, inner = in.intermediate;
  std::vector<double> gate(inner), up(inner), row(h);
  for (int64_t i = 0; i < h; ++i) {
    const double x = number(in.x[token * h + i]);
    for (int64_t j = 0; j < inner; ++j) {
      gate[j] += x * number(in.wi_0[(expert * h + i) * inner + j]);
      up[j] += x * number(in.wi_1[(expert * h + i) * inner + j]);
    }
  }
  for (int64_t j = 0; j < inner; ++j) {
    const double hidden = gate[j] / (1 + std::exp(-gate[j])) * up[j];
    for (int64_t i = 0; i < h; ++i) row[i] += hidden * number(in.wo[(expert * inner + j) * h + i]);
  }
  return row;
}

// The relative error of y and of the router gradients over some tokens, the first and the last among them.
double error_of_some_tokens(const Inputs& in, const Results& results) {
  constexpr int64_t kTokens = 8;
  const std::vector<double> y = as_numbers<bf16>(results.at("y"));
  const std::vector<double> grads = as_numbers<float>(results.at("router_grads"));
  double y_error = 0, y_size = 0, grad_error = 0, grad_size = 0;
  const auto add = [](double actual, double expected, double& error, double& size) {
    error += (actual - expected) * (actual - expected);
    size += expected * expected;
  };
  for (int64_t i = 0; i < kTokens; ++i) {
    const int64_t token = i * (in.tokens - 1) / (kTokens - 1), h = in.hidden;
    if (in.bad(token)) continue;
    std::vector<double> sum(h);
    for (int64_t slot = token * in.top_k; slot < (token + 1) * in.top_k; ++slot) {
      double grad = 0;
      if (in.ids[slot] >= 0) {
        const std::vector<double> row = expert_row(in, token, in.ids[slot]);
        for (int64_t c = 0; c < h; ++c) {
          sum[c] += in.weights[slot] * row[c];
          grad += number(in.dy[token * h + c]) * row[c];
        }
      }
      add(grads[slot], grad, grad_error, grad_size);
    }
    for (int64_t c = 0; c < h; ++c) add(y[token * h + c], sum[c], y_error, y_size);
  }
  return std::sqrt(larger(y_error / y_size, grad_error / grad_size));
}

void run_all(const Options& o) {
  const Inputs in(o);
  Results first;
  for (int64_t ranks : o.all("ranks")) {
    for (int64_t ring_rows : o.all("ring-rows")) {
      for (int64_t comm_ctas : o.all("comm-ctas")) {
        for (int64_t save : o.all("save")) {
          const Setting setting{ranks, ring_rows, comm_ctas, save};
          std::printf("%s: ", setting.text().c_str());
          std::fflush(stdout);
          Step step(in, o, setting);
          for (int64_t repeat = 0; repeat < o.one("repeats"); ++repeat) {
            const Results results = step.run(o.one("poison") != 0);
            if (o.one("fails")) return expect_failure(o, results);
            check(failure_text());
            if (first.empty()) {
              first = results;
              expect_finite(in, o, first);
              const double error = error_of_some_tokens(in, first);
              std::printf("relative error %.1e, ", error);
              if (!(error <= 1e-2)) throw std::runtime_error("wrong");
            }
            expect_same(results, first);
          }
          std::printf("%lld runs, same bits\n", static_cast<long long>(o.one("repeats")));
          std::fflush(stdout);
        }
      }
    }
  }
}

}  // namespace
}  // namespace mok::cuda::test

int main(int argc, char** argv) {
  try {
    mok::cuda::test::run_all(mok::cuda::test::Options(argc, argv));
  } catch (const std::exception& error) {
    std::printf("%s\n", error.what());
    return EXIT_FAILURE;
  }
}
