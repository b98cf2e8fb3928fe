// The schedule kernel alone, on virtual ranks: what it makes is what csrc/moe says, whatever the number of CTAs and of
// chunks; it ends beside a kernel that holds almost the whole device; and it leaves where a call has failed.
#include <algorithm>
#include <chrono>
#include <memory>
#include <random>
#include <set>

#include "cuda/ptx.cuh"
#include "cuda/schedule.h"
#include "cuda/test/harness.cuh"
#include "moe/lists.h"

namespace mok::cuda::test {
namespace {

constexpr TileCounts kTiles{
    .gate_up = 3, .down = 4, .hidden_grad = 2, .row_grad = 4, .weight_grad = 6, .down_bands = 2};
constexpr Save kSave = Save::pre_activations;

Shape shape_of(int64_t ranks, int64_t tokens, int64_t top_k, int64_t local_experts, int64_t hidden) {
  Shape s{.ranks = ranks,
          .rank = 0,
          .tokens = tokens,
          .top_k = top_k,
          .hidden_size = hidden,
          .intermediate_size = 8,
          .local_experts = local_experts,
          .ring_rows = 0,
          .minibatch_rows = kRowBlock};
  s.ring_rows = smaller<int64_t>(4 * kRowBlock, max_rows(s));  // several macrobatches, where rows are many
  return s;
}

// [ranks, ...], of all ranks.
struct Inputs {
  std::vector<bf16> x, dy;
  std::vector<int32_t> ids;
  std::vector<float> weights;

  explicit Inputs(const Shape& s) {
    std::mt19937 random(1);
    for (int64_t i = 0; i < s.ranks * s.tokens * s.hidden_size; ++i) {
      x.push_back(bf16(static_cast<float>(random() % 256)));
      dy.push_back(bf16(-static_cast<float>(random() % 256)));
    }
    for (int64_t slot = 0; slot < s.ranks * s.slots(); ++slot) {
      const uint32_t draw = random() % 100;
      const bool bad = slot / s.top_k % 50 == 7 && slot % s.top_k == 0;
      const int64_t any = random() % static_cast<uint32_t>(s.experts());
      const int64_t id = draw < 5 ? -1 : draw < 30 ? 1 % s.experts() : any;
      ids.push_back(static_cast<int32_t>(bad ? s.experts() : id));
      weights.push_back(static_cast<float>(random() % 1000));
    }
  }
};

// Clean ids of all ranks, as csrc/moe asks for them.
struct IdOf {
  const int32_t* clean;
  int64_t slots;
  MOK_FN int32_t operator()(int64_t rank, int64_t slot) const { return clean[rank * slots + slot]; }
};

// What one rank's tables must be, made by the host.
struct Expected {
  Shape shape;
  std::vector<int32_t> clean, expert_rows, expert_block, macro_block;
  std::vector<uint8_t> bad;
  std::vector<RowSource> rows;
  int32_t bad_tokens = 0;
  Plan plan;

  Expected(const Shape& s, const Inputs& in, int64_t rank)
      : shape(s),
        clean(s.ranks * s.slots()),
        expert_rows(s.local_experts),
        expert_block(s.local_experts + 1),
        macro_block(max_macrobatches(s) + 1),
        bad(s.tokens) {
    shape.rank = rank;
    for (int64_t i = 1; i <= s.ranks; ++i) {  // its own ids last, so that `bad` is of its tokens
      const int64_t first = (rank + i) % s.ranks * s.slots();
      bad_tokens = clean_expert_ids(s, in.ids.data() + first, clean.data() + first, bad.data());
    }
    const IdOf id_of{clean.data(), s.slots()};
    count_rows(shape, id_of, expert_rows.data(), expert_block.data());
    rows.resize(expert_block.back() * kRowBlock);
    std::vector<int64_t> next(s.local_experts);
    fill_row_table(shape, id_of, expert_rows.data(), expert_block.data(), next.data(), rows.data());
    const auto own = clean.begin() + rank * s.slots();
    const auto valid = std::count_if(own, own + s.slots(), [](int32_t id) { return id >= 0; });
    make_plan(shape, kTiles, kSave, static_cast<int32_t>(valid), expert_rows.data(), expert_block.data(),
              macro_block.data(), plan);
    macro_block.resize(plan.macrobatches + 1);
  }
};

std::vector<int64_t> numbers_of(const Plan& p) {
  const TileCounts& t = p.tiles;
  return {
      t.gate_up,    t.down,  t.hidden_grad, t.row_grad,    t.weight_grad,      t.down_bands,   static_cast<int>(p.save),
      p.rank,       p.ranks, p.experts,     p.ring_blocks, p.minibatch_blocks, p.macrobatches, p.token_blocks,
      p.valid_slots};
}

std::vector<int64_t> numbers_of(const TaskList& list, const Segment* segments) {
  std::vector<int64_t> numbers{list.count, list.tasks};
  for (int32_t i = 0; i < list.count; ++i) {
    const Segment& s = segments[i];
    for (int64_t number : {int64_t{static_cast<int>(s.kind)}, int64_t{s.macrobatch}, int64_t{s.begin}, int64_t{s.end},
                           int64_t{s.first_part}, int64_t{s.parts}, s.first_ticket}) {
      numbers.push_back(number);
    }
  }
  return numbers;
}

// Host memory that the device writes and reads.
template <class T>
class Mapped {
 public:
  Mapped() {
    check(cudaHostAlloc(&data_, sizeof(T), cudaHostAllocMapped));
    *data_ = T{};
  }
  Mapped(const Mapped&) = delete;
  ~Mapped() { cudaFreeHost(data_); }
  T* operator->() const { return data_; }
  T* get() const { return data_; }

 private:
  T* data_ = nullptr;
};

int32_t attribute(cudaDeviceAttr name) {
  int value;
  check(cudaDeviceGetAttribute(&value, name, 0));
  return value;
}
int32_t multiprocessors() { return attribute(cudaDevAttrMultiProcessorCount); }

// Memory of ranks side by side, and launches of a direction's schedule kernel on it.
template <class R>
class Ranks {
 public:
  static constexpr Direction kDirection = R::kDirection;

  explicit Ranks(const Shape& s)
      : shape_(s),
        layout_(s),
        arena_(local_arena(s)),
        in_(s),
        x_(in_.x),
        dy_(in_.dy),
        ids_(in_.ids),
        weights_(in_.weights),
        rows_(s.ranks * max_rows(s) * 2),
        expert_rows_(s.ranks * s.local_experts),
        bad_tokens_(s.ranks),
        workspace_(s.ranks * layout_.bytes),
        arenas_(s.ranks * arena_.bytes),
        ranks_(s.ranks),
        device_(1) {
    for (int64_t r = 0; r < s.ranks; ++r) expected_.push_back(std::make_unique<Expected>(s, in_, r));
    check(cudaFuncSetAttribute(schedule_kernel(kDirection), cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(shared_bytes())));
  }

  int64_t shared_bytes() const { return schedule_shared_bytes(kDirection, shape_); }
  int32_t all_ctas() const { return std::max<int32_t>(1, multiprocessors() / static_cast<int32_t>(shape_.ranks)); }
  Failure& failure() { return *failure_.get(); }

  // Everything as before a call, and nothing written that the kernel must write.
  void prepare(int64_t entry_timeout_ns = 30'000'000'000, const Failure& failed = {}) {
    check(cudaMemset(rows_.data(), kUnwritten, shape_.ranks * max_rows(shape_) * 2 * 4));
    check(cudaMemset(expert_rows_.data(), kUnwritten, shape_.ranks * shape_.local_experts * 4));
    check(cudaMemset(bad_tokens_.data(), kUnwritten, shape_.ranks * 4));
    check(cudaMemset(workspace_.data(), kUnwritten, shape_.ranks * layout_.bytes));
    DeviceState state{};
    state.failure = failed;
    check(cudaMemcpy(device_.data(), &state, sizeof(state), cudaMemcpyHostToDevice));
    std::vector<R> ranks;
    for (int64_t r = 0; r < shape_.ranks; ++r) {
      check(cudaMemset(workspace_.data() + r * layout_.bytes, 0, layout_.zeroed));
      Meeting met{};
      met.progress.call = calls_;
      for (Entry& entry : met.entries) entry.call = calls_;
      check(cudaMemset(arena(r), kUnwritten, arena_.bytes));
      check(cudaMemcpy(meeting(r), &met, sizeof(met), cudaMemcpyHostToDevice));
      if constexpr (kDirection == Direction::backward) {  // has it from the forward
        check(cudaMemcpy(expert_rows_.data() + r * shape_.local_experts, expected_[r]->expert_rows.data(),
                         shape_.local_experts * 4, cudaMemcpyHostToDevice));
      }
      ranks.push_back(rank(r, entry_timeout_ns));
    }
    check(cudaMemcpy(ranks_.data(), ranks.data(), ranks.size() * sizeof(R), cudaMemcpyHostToDevice));
    one_ = ranks[0];
    ++calls_;
    check(cudaDeviceSynchronize());
  }

  // Changes the arguments of rank 0, and what it finds in its Meeting.
  template <class Change>
  void change_first(const Change& change) {
    Meeting met;
    check(cudaMemcpy(&met, meeting(0), sizeof(met), cudaMemcpyDeviceToHost));
    change(one_, met);
    check(cudaMemcpy(meeting(0), &met, sizeof(met), cudaMemcpyHostToDevice));
    check(cudaMemcpy(ranks_.data(), &one_, sizeof(R), cudaMemcpyHostToDevice));
  }

  void launch(int32_t ctas, int32_t chunks, int32_t ranks_here, cudaStream_t stream = nullptr) {
    Launch<R> arguments{.one = one_,
                        .many = ranks_here > 1 ? ranks_.data() : nullptr,
                        .ranks_here = ranks_here,
                        .communication_ctas = 0,
                        .schedule_chunks = chunks};
    void* pointers[] = {&arguments};
    check(cudaLaunchKernel(schedule_kernel(kDirection), dim3(ctas * ranks_here), dim3(schedule_threads()), pointers,
                           shared_bytes(), stream));
  }
  void launch(int32_t ctas, int32_t chunks, cudaStream_t stream = nullptr) {
    launch(ctas, chunks, static_cast<int32_t>(shape_.ranks), stream);
  }

  void expect_all() const {
    const std::vector<uint8_t> workspace = workspace_.host(), arenas = arenas_.host();
    const std::vector<int32_t> rows = rows_.host(), expert_rows = expert_rows_.host(), bad_tokens = bad_tokens_.host();
    for (int64_t r = 0; r < shape_.ranks; ++r) {
      const Expected& e = *expected_[r];
      expect_schedule(e, workspace.data() + r * layout_.bytes);
      expect_arena(e, workspace.data() + r * layout_.bytes, arenas.data() + r * arena_.bytes);
      if constexpr (kDirection == Direction::backward) continue;
      expect_rows(e, rows.data() + r * max_rows(shape_) * 2);
      expect_equal(part<int32_t>(expert_rows.data() + r * shape_.local_experts, e.expert_rows.size()), e.expert_rows);
      expect_equal(part<int32_t>(bad_tokens.data() + r, 1), {e.bad_tokens});
    }
  }

  // Where the kernel left early.
  void expect_no_rows() const {
    const std::vector<int32_t> rows = rows_.host();
    expect_equal(rows, std::vector<int32_t>(rows.size(), unwritten<int32_t>()));
  }
  void expect_no_schedule() const {
    const std::vector<uint8_t> workspace = workspace_.host();
    for (int64_t r = 0; r < shape_.ranks; ++r) {
      const auto begin = workspace.begin() + r * layout_.bytes + layout_.schedule;
      const std::vector<uint8_t> schedule(begin, begin + sizeof(Schedule));
      expect_equal(schedule, std::vector<uint8_t>(sizeof(Schedule), kUnwritten));
    }
  }

 private:
  template <class T>
  static std::vector<T> part(const void* data, size_t count) {
    std::vector<T> values(count);
    if (count > 0) std::memcpy(static_cast<void*>(values.data()), data, count * sizeof(T));
    return values;
  }

  uint8_t* arena(int64_t r) const { return arenas_.data() + r * arena_.bytes; }
  Meeting* meeting(int64_t r) const {
    return reinterpret_cast<Meeting*>(workspace_.data() + r * layout_.bytes + layout_.meeting);
  }

  R rank(int64_t r, int64_t entry_timeout_ns) const {
    R rank{};
    rank.shape = expected_[r]->shape;
    rank.tiles = kTiles;
    rank.save = kSave;
    rank.timeout_ns = 30'000'000'000;
    rank.entry_timeout_ns = entry_timeout_ns;
    rank.x = x_.data() + r * shape_.tokens * shape_.hidden_size;
    rank.dy = kDirection == Direction::backward ? dy_.data() + r * shape_.tokens * shape_.hidden_size : nullptr;
    rank.expert_ids = ids_.data() + r * shape_.slots();
    rank.expert_weights = weights_.data() + r * shape_.slots();
    rank.row_table = reinterpret_cast<RowSource*>(rows_.data()) + r * max_rows(shape_);
    rank.expert_rows = expert_rows_.data() + r * shape_.local_experts;
    rank.workspace = workspace_.data() + r * layout_.bytes;
    rank.arena_ids = arena_.expert_ids[1];
    for (int64_t peer = 0; peer < shape_.ranks; ++peer) {
      rank.meetings[peer] = meeting(peer);
      rank.arenas[peer] = arena(peer) + arena_.rows_begin;
    }
    rank.device = device_.data();
    rank.host_failure = failure_.get();
    if constexpr (kDirection == Direction::forward) rank.bad_tokens = bad_tokens_.data() + r;
    return rank;
  }

  void expect_schedule(const Expected& e, const uint8_t* workspace) const {
    const Schedule schedule = part<Schedule>(workspace + layout_.schedule, 1)[0];
    const TaskLists lists(kDirection, e.shape, e.plan);
    expect_equal(part<int32_t>(workspace + layout_.expert_block, e.expert_block.size()), e.expert_block);
    expect_equal(part<int32_t>(workspace + layout_.macro_block, e.macro_block.size()), e.macro_block);
    expect_equal(numbers_of(schedule.plan), numbers_of(e.plan));
    expect_list(schedule.communication, workspace + layout_.communication, lists.communication());
    expect_list(schedule.compute, workspace + layout_.compute, lists.compute());
    expect_equal<int64_t>({schedule.first_pulls}, {lists.communication().first_pulls()});
  }

  void expect_list(const TaskList& list, const uint8_t* segments, const TaskList& expected) const {
    expect_equal<int32_t>({list.count}, {expected.count});
    expect_equal(numbers_of(list, part<Segment>(segments, list.count).data()), numbers_of(expected, expected.segments));
  }

  void expect_arena(const Expected& e, const uint8_t* workspace, const uint8_t* arena) const {
    const int64_t elements = shape_.tokens * shape_.hidden_size, slots = shape_.slots(), r = e.shape.rank;
    const DeviceRows at(shape_);
    const uint8_t* rows = arena + arena_.rows_begin;
    if (shape_.ranks > 1) {
      expect_equal(part<bf16>(rows + at.x, elements), part<bf16>(&in_.x[r * elements], elements));
    }
    if (shape_.ranks > 1 && kDirection == Direction::backward) {
      expect_equal(part<bf16>(rows + at.dy, elements), part<bf16>(&in_.dy[r * elements], elements));
    }
    expect_equal(part<float>(rows + at.weights, slots), part<float>(&in_.weights[r * slots], slots));
    const uint8_t* ids = arena + arena_.expert_ids[parity_of(calls_)];
    if (kDirection == Direction::forward) {
      expect_equal(part<int32_t>(ids, shape_.ranks * slots), e.clean);
    } else {  // its own alone
      expect_equal(part<int32_t>(ids + 4 * r * slots, slots), part<int32_t>(&e.clean[r * slots], slots));
    }
    expect_equal<int32_t>(part_as_numbers(workspace + layout_.bad), {e.bad.begin(), e.bad.end()});
  }
  std::vector<int32_t> part_as_numbers(const uint8_t* bytes) const { return {bytes, bytes + shape_.tokens}; }

  // And nothing behind the last one.
  void expect_rows(const Expected& e, const int32_t* rows) const {
    std::vector<int32_t> all = part<int32_t>(e.rows.data(), e.rows.size() * 2);
    all.resize(max_rows(shape_) * 2, unwritten<int32_t>());
    expect_equal(part<int32_t>(rows, all.size()), all,
                 [](size_t i) { return (i % 2 ? "slot of row " : "rank of row ") + std::to_string(i / 2); });
  }

  const Shape shape_;
  const WorkspaceLayout layout_;
  const SharedArenaLayout arena_;
  const Inputs in_;
  const Array<bf16> x_, dy_;
  const Array<int32_t> ids_;
  const Array<float> weights_;
  const Array<int32_t> rows_, expert_rows_, bad_tokens_;
  const Array<uint8_t> workspace_, arenas_;
  const Array<R> ranks_;
  const Array<DeviceState> device_;
  const Mapped<Failure> failure_;
  std::vector<std::unique_ptr<Expected>> expected_;
  R one_{};
  int64_t calls_ = 0;  // that were begun
};

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

constexpr int32_t kMost = 1024;  // CTAs of the kernels below

struct Words {
  int32_t stop, timed_out;
  int32_t spins_on[kMost], probed_on[kMost];  // by CTA, 1 + the multiprocessor that it is on; 0: not yet there
};

__device__ int32_t multiprocessor() {
  int32_t i;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(i));
  return i;
}

// Holds its multiprocessor until the host says stop, or for `limit_ns`.
__global__ void spin(volatile Words* words, uint64_t limit_ns) {
  if (threadIdx.x == 0) {
    words->spins_on[blockIdx.x] = 1 + multiprocessor();
    const uint64_t begin = nanoseconds();
    while (words->stop == 0) {
      __nanosleep(1000);
      if (nanoseconds() - begin < limit_ns) continue;
      words->timed_out = 1;
      break;
    }
  }
  __syncthreads();
}

__global__ void probe(volatile Words* words) {
  if (threadIdx.x == 0) words->probed_on[blockIdx.x] = 1 + multiprocessor();
}

// Whether it was so within some seconds.
template <class Condition>
bool becomes_true(double seconds, const Condition& condition) {
  const auto begin = std::chrono::steady_clock::now();
  while (!condition()) {
    if (std::chrono::steady_clock::now() - begin > std::chrono::duration<double>(seconds)) return false;
  }
  return true;
}

class Stream {
 public:
  Stream() {
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    check(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming));
  }
  Stream(const Stream&) = delete;
  ~Stream() {
    cudaEventDestroy(event_);
    cudaStreamDestroy(stream_);
  }
  operator cudaStream_t() const { return stream_; }
  // Whether all that it has been given so far ends within some seconds.
  bool ends(double seconds) {
    check(cudaGetLastError());
    check(cudaEventRecord(event_, stream_));
    return becomes_true(seconds, [&] { return cudaEventQuery(event_) == cudaSuccess; });
  }

 private:
  cudaStream_t stream_ = nullptr;
  cudaEvent_t event_ = nullptr;
};

// Spins on all multiprocessors but `free` of them for as long as it lives, with all shared memory of each, so that no
// other CTA fits there.
class Spinning {
 public:
  Spinning(int32_t free, int64_t shared_of_others) : ctas_(multiprocessors() - free) {
    const int shared = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
    check(cudaFuncSetAttribute(spin, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
    check(cudaFuncSetAttribute(probe, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_of_others)));
    spin<<<ctas_, 1024, shared, stream_>>>(words_.get(), 15'000'000'000);
    const volatile int32_t* on = words_->spins_on;
    if (!becomes_true(5, [&] { return std::all_of(on, on + ctas_, [](int32_t sm) { return sm != 0; }); })) {
      throw Failed("the spinning kernel did not become resident");
    }
    Stream others;
    probe<<<4 * multiprocessors(), schedule_threads(), shared_of_others, others>>>(words_.get());
    if (!others.ends(5)) throw Failed("a small kernel did not end beside the spinning one");
    const std::set<int32_t> probed(words_->probed_on, words_->probed_on + 4 * multiprocessors());
    const std::set<int32_t> held(words_->spins_on, words_->spins_on + ctas_);
    for (int32_t sm : probed) {
      if (held.contains(sm)) throw Failed("CTAs fit beside those of the spinning kernel");
    }
    if (probed.size() > static_cast<size_t>(free)) throw Failed("more multiprocessors are free than was meant");
  }
  Spinning(const Spinning&) = delete;
  ~Spinning() { stop(); }

  // Whether it had been spinning until now.
  bool stop() {
    *static_cast<volatile int32_t*>(&words_->stop) = 1;
    cudaStreamSynchronize(stream_);
    return !words_->timed_out;
  }

 private:
  struct Stopping : Mapped<Words> {  // also where the constructor throws
    ~Stopping() {
      *static_cast<volatile int32_t*>(&get()->stop) = 1;
      cudaDeviceSynchronize();
    }
  };
  const int32_t ctas_;
  Stream stream_;
  Stopping words_;
};

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
  Spinning spinning(static_cast<int32_t>(ceil_div(s.ranks, resident)), ranks.shared_bytes());
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

// Rank 0 is changed, and all end their call early, since virtual ranks are of one device.
template <class R, class Change>
void run_changed(FailureCode code, int32_t counter, const Change& change) {
  Ranks<R> ranks(shape_of(2, 1000, 8, 16, 64));
  ranks.prepare();
  ranks.change_first(change);
  ranks.launch(ranks.all_ctas(), ranks.all_ctas());
  check(cudaDeviceSynchronize());
  ranks.expect_no_rows();
  const Failure& failure = ranks.failure();
  expect_equal<int32_t>({failure.code, failure.counter}, {static_cast<int32_t>(code), counter});
}

// Either rank may be the first to see that the other means another call.
TEST(ranks_in_different_calls) {
  const auto change = [](auto& rank, Meeting&) { rank.hash = 7; };
  Ranks<ForwardRank> ranks(shape_of(2, 1000, 8, 16, 64));
  ranks.prepare();
  ranks.change_first(change);
  ranks.launch(ranks.all_ctas(), ranks.all_ctas());
  check(cudaDeviceSynchronize());
  ranks.expect_no_schedule();
  const Failure& failure = ranks.failure();
  expect_equal<int32_t>({failure.code, failure.counter},
                        {static_cast<int32_t>(FailureCode::disagreement), 1 - failure.rank});
}

TEST(a_rank_in_two_calls) {
  const auto change = [](auto&, Meeting& met) { met.progress.busy = 1; };
  run_changed<ForwardRank>(FailureCode::concurrent, -1, change);
  run_changed<BackwardRank>(FailureCode::concurrent, -1, change);
}

TEST(a_rank_in_another_place) {
  const Array<int32_t> where(std::vector<int32_t>{1, 0});
  const auto change = [&](auto& rank, Meeting&) { rank.where = where.data(); };
  run_changed<ForwardRank>(FailureCode::misplaced, 1, change);
  run_changed<BackwardRank>(FailureCode::misplaced, 1, change);
}

}  // namespace
}  // namespace mok::cuda::test

int main(int argc, char** argv) { return mok::cuda::test::run(argc, argv); }
