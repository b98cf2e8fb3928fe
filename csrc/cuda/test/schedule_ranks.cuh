// What tests of the schedule kernel run it on: inputs of virtual ranks, what csrc/moe makes of them on the host, and
// the ranks' memory on the device.
#pragma once

#include <algorithm>
#include <memory>
#include <random>

#include "cuda/schedule.h"
#include "cuda/test/harness.cuh"
#include "moe/lists.h"

namespace mok::cuda::test {

inline constexpr TileCounts kTiles{
    .gate_up = 3, .down = 4, .hidden_grad = 2, .row_grad = 4, .weight_grad = 6, .down_bands = 2};
inline constexpr Save kSave = Save::pre_activations;

inline Shape shape_of(int64_t ranks, int64_t tokens, int64_t top_k, int64_t local_experts, int64_t hidden) {
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

inline std::vector<int64_t> numbers_of(const Plan& p) {
  const TileCounts& t = p.tiles;
  return {
      t.gate_up,    t.down,  t.hidden_grad, t.row_grad,    t.weight_grad,      t.down_bands,   static_cast<int>(p.save),
      p.rank,       p.ranks, p.experts,     p.ring_blocks, p.minibatch_blocks, p.macrobatches, p.token_blocks,
      p.valid_slots};
}

inline std::vector<int64_t> numbers_of(const TaskList& list, const Segment* segments) {
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

}  // namespace mok::cuda::test
