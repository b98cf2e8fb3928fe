#include "host/executor.h"

#include <algorithm>
#include <cstring>

#include "host/workers.h"

namespace mok::host {
namespace {

// Owns what a Plan points at.
struct PlanTables {
  std::vector<int32_t> expert_block, macro_block;

  Plan plan(const Shape& s, Save save, const int32_t* expert_rows, const TokenIds& tokens) {
    expert_block.assign(s.local_experts + 1, 0);
    macro_block.assign(max_macrobatches(s) + 1, 0);
    place_experts(static_cast<int32_t>(s.local_experts), expert_rows, expert_block.data());
    const auto valid_slots = std::ranges::count_if(tokens.clean, [](int32_t id) { return id >= 0; });
    Plan p;
    make_plan(s, tile_counts(s), save, static_cast<int32_t>(valid_slots), expert_rows, expert_block.data(),
              macro_block.data(), p);
    return p;
  }
};

TokenIds clean_ids(const Shape& shape, const int32_t* ids) {
  TokenIds tokens{std::vector<int32_t>(shape.slots()), std::vector<uint8_t>(shape.tokens), 0};
  tokens.bad_count = clean_expert_ids(shape, ids, tokens.clean.data(), tokens.bad.data());
  return tokens;
}

// Puts what peers will read into this rank's arena.
template <class T>
void fill_arena(const Shape& s, const Inputs<T>& inputs, const TokenIds& tokens, std::byte* arena) {
  const ArenaLayout layout(s, sizeof(T));
  std::memcpy(arena + layout.x, inputs.x, s.tokens * s.hidden_size * sizeof(T));
  if (inputs.dy) std::memcpy(arena + layout.dy, inputs.dy, s.tokens * s.hidden_size * sizeof(T));
  std::memcpy(arena + layout.weights, inputs.expert_weights, s.slots() * sizeof(float));
  std::memcpy(arena + layout.expert_ids, tokens.clean.data(), s.slots() * sizeof(int32_t));
}

void build_row_table(const Shape& shape, const std::vector<std::byte*>& arenas, int64_t ids_offset,
                     const Routing& routing) {
  const auto ids = [&](int64_t rank, int64_t slot) {
    return reinterpret_cast<const int32_t*>(arenas[rank] + ids_offset)[slot];
  };
  std::vector<int32_t> expert_block(shape.local_experts + 1);
  std::vector<int64_t> next(shape.local_experts);
  count_rows(shape, ids, routing.expert_rows, expert_block.data());
  fill_row_table(shape, ids, routing.expert_rows, expert_block.data(), next.data(), routing.row_table);
}

}  // namespace

template <class T>
std::optional<std::string> execute(Call<T> call, GroupCall& group, const Options& options) {
  const Shape& shape = call.shape;
  call.buffers.arenas = group.arenas();
  call.buffers.row_table = call.routing.row_table;
  const TokenIds tokens = clean_ids(shape, call.inputs.expert_ids);
  fill_arena(shape, call.inputs, tokens, group.arena(shape.rank));
  if (!group.enter(shape.rank, options.entry_timeout_s)) {
    group.cancel("rank " + std::to_string(shape.rank) + " waited longer than entry_timeout_s = " +
                 std::to_string(options.entry_timeout_s) + " s for all ranks to start this call");
    return group.reason();
  }
  if (call.direction == Direction::forward) {
    *call.routing.bad_tokens = tokens.bad_count;
    build_row_table(shape, call.buffers.arenas, ArenaLayout(shape, sizeof(T)).expert_ids, call.routing);
  }
  PlanTables tables;
  const Plan plan = tables.plan(shape, call.save, call.routing.expert_rows, tokens);
  const TaskLists lists(call.direction, shape, plan);
  const auto run_task = [&](const Task& task, TileMatmul& matmul) {
    Tiles<T>(call.direction, shape, plan, call.buffers, tokens, call.activation, matmul).run(task);
  };
  Workers workers(call.direction, plan, lists, call.routing.row_table, group, options, run_task);
  workers.run();
  if (group.cancelled()) return group.reason();
  return std::nullopt;
}

template std::optional<std::string> execute(Call<float>, GroupCall&, const Options&);
template std::optional<std::string> execute(Call<BFloat16>, GroupCall&, const Options&);

}  // namespace mok::host
