#include "cuda/runtime/arguments.h"

namespace mok::cuda {
namespace {

int64_t nanoseconds(double seconds) { return static_cast<int64_t>(seconds * 1e9); }

int64_t pre_activation_elements(const Shape& s) { return s.ring_rows * pre_activation_width(s.intermediate_size); }

// Where the ranks of the call meet, and where their arenas are: with their peers, or in the call's workspace.
void place_ranks(const Call& c, Rank& rank) {
  const Shape& s = c.shape;
  if (c.peers) {
    const SharedArenaLayout layout{ArenaClass(s, 2)};
    rank.arena_ids = layout.expert_ids[1];
    rank.where = c.where;
    for (int64_t r = 0; r < s.ranks; ++r) {
      rank.meetings[r] = c.peers->meetings[r];
      rank.arenas[r] = c.peers->arenas[r] + layout.rows_begin;
    }
    return;
  }
  const SharedArenaLayout layout = local_arena(s);
  const WorkspaceLayout workspace(s);
  rank.arena_ids = layout.expert_ids[1];
  rank.where = nullptr;
  for (int64_t r = 0; r < s.ranks; ++r) {
    uint8_t* begin = c.workspace + r * workspace_bytes(s, c.ranks_here);
    rank.meetings[r] = reinterpret_cast<Meeting*>(begin + workspace.meeting);
    rank.arenas[r] = begin + workspace.bytes + layout.rows_begin;
  }
}

// Of what ranks must have alike to be in the same call (FNV-1a, 64 bits).
uint64_t hash_of(const Call& c, const TileCounts& tiles) {
  const Shape& s = c.shape;
  uint64_t hash = 14695981039346656037u;
  for (const int64_t value :
       {s.ranks, s.tokens, s.top_k, s.hidden_size, s.intermediate_size, s.local_experts, int64_t{tiles.down_bands},
        static_cast<int64_t>(c.direction), static_cast<int64_t>(c.activation), c.program}) {
    for (int32_t byte = 0; byte < 8; ++byte) hash = (hash ^ (value >> 8 * byte & 0xff)) * 1099511628211u;
  }
  return hash;
}

// What both directions have.
void fill_common(const Call& c, int32_t i, const Device& device, Rank& rank) {
  const Shape& s = c.shape;
  rank.shape = s;
  rank.shape.rank += i;
  rank.tiles = device.backend->tile_counts(s);
  rank.save = c.save;
  rank.activation = c.activation;
  rank.activation_limit = c.activation_limit;
  rank.timeout_ns = nanoseconds(c.timeout_s);
  rank.entry_timeout_ns = nanoseconds(c.entry_timeout_s);
  rank.x = nth(c.x, i, s.tokens * s.hidden_size);
  rank.dy = nth(c.dy, i, s.tokens * s.hidden_size);
  rank.expert_ids = nth(c.expert_ids, i, s.slots());
  rank.expert_weights = nth(c.expert_weights, i, s.slots());
  const int64_t weights = s.local_experts * s.hidden_size * s.intermediate_size;
  rank.wi_0 = nth(c.wi_0, i, weights);
  rank.wi_1 = nth(c.wi_1, i, weights);
  rank.wo = nth(c.wo, i, weights);
  rank.out = nth(c.out, i, s.tokens * s.hidden_size);
  rank.row_table = nth(c.row_table, i, max_rows(s));
  rank.expert_rows = nth(c.expert_rows, i, s.local_experts);
  rank.rows = nth(c.rows, i, s.ring_rows * s.hidden_size);
  rank.hidden = nth(c.hidden, i, s.ring_rows * s.intermediate_size);
  const int64_t bytes = workspace_bytes(s, c.ranks_here);
  rank.workspace = c.workspace + i * bytes;
  place_ranks(c, rank);
  rank.hash = hash_of(c, rank.tiles);
  rank.device = device.state;
  rank.host_failure = device.failure;
}

}  // namespace

void fill(const ForwardCall& c, int32_t i, const Device& device, ForwardRank& rank) {
  fill_common(c, i, device, rank);
  rank.bad_tokens = c.bad_tokens + i;
  rank.pre_activations = nth(c.pre_activations, i, pre_activation_elements(c.shape));
}

void fill(const BackwardCall& c, int32_t i, const Device& device, BackwardRank& rank) {
  fill_common(c, i, device, rank);
  const Shape& s = c.shape;
  const int64_t grad_bytes = s.local_experts * s.hidden_size * s.intermediate_size * (c.grads_in_f32 ? 4 : 2);
  rank.pre_activations = nth(c.pre_activations, i, pre_activation_elements(s));
  rank.saved_pre_activations = nth(c.saved_pre_activations, i, pre_activation_elements(s));
  rank.saved_rows = nth(c.saved_rows, i, s.ring_rows * s.hidden_size);
  rank.grads = nth(c.grads, i, s.ring_rows * s.hidden_size);
  rank.gate_up_grads = nth(c.gate_up_grads, i, s.ring_rows * 2 * s.intermediate_size);
  rank.row_weights = nth(c.row_weights, i, s.ring_rows);
  rank.router_parts = nth(c.router_parts, i, s.ring_rows * router_parts_width(s.intermediate_size));
  rank.straddle = nth(c.straddle, i, straddle_elements(s.hidden_size, s.intermediate_size));
  rank.router_grads = nth(c.router_grads, i, s.slots());
  rank.wi_0_grad = nth(static_cast<std::byte*>(c.wi_0_grad), i, grad_bytes);
  rank.wi_1_grad = nth(static_cast<std::byte*>(c.wi_1_grad), i, grad_bytes);
  rank.wo_grad = nth(static_cast<std::byte*>(c.wo_grad), i, grad_bytes);
  rank.grads_in_f32 = c.grads_in_f32;
}

}  // namespace mok::cuda
