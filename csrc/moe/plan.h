// The plan: what a rank knows once its rows are counted. A few hundred integers from which every task of the call
// follows; the task program reads nothing else.
#pragma once

#include "moe/ring.h"
#include "moe/row_table.h"

namespace mok {

inline constexpr int32_t kColumnBands = 4;

// How many tiles each matrix product of a row block (of an expert, for weight_grad) is divided into. Chosen by the
// executor from (H, I, precision, architecture) only, never from rows or ranks: tiles decide the order of sums.
struct TileCounts {
  int32_t gate_up;      // of [kRowBlock, 2 I]: pre-activations and SwiGLU
  int32_t down;         // of [kRowBlock, H]
  int32_t hidden_grad;  // of [kRowBlock, I]: dy wo^T, and back through SwiGLU
  int32_t row_grad;     // of [kRowBlock, H]: dgate wi_0^T + dup wi_1^T
  int32_t weight_grad;  // of one expert's wi_0, wi_1 and wo together
  int32_t down_bands;   // of columns, at most kColumnBands: in how many steps the forward finishes y (see program.h)
};

// Tiles of kRowBlock rows (weight_grad: of a matrix) by `columns` columns; of gate_up, by so many of gate and of up.
MOK_FN TileCounts count_tiles(const Shape& s, int64_t columns, int64_t gate_up_columns, int32_t down_bands) {
  const int64_t h_across = ceil_div(s.hidden_size, columns), i_across = ceil_div(s.intermediate_size, columns);
  const int64_t weight_grad =
      2 * ceil_div(s.hidden_size, kRowBlock) * i_across + ceil_div(s.intermediate_size, kRowBlock) * h_across;
  TileCounts tiles;
  tiles.gate_up = static_cast<int32_t>(ceil_div(s.intermediate_size, gate_up_columns));
  tiles.down = tiles.row_grad = static_cast<int32_t>(h_across);
  tiles.hidden_grad = static_cast<int32_t>(i_across);
  tiles.weight_grad = static_cast<int32_t>(weight_grad);
  tiles.down_bands = down_bands;
  return tiles;
}

struct Plan {
  TileCounts tiles;
  Save save;
  int32_t rank, ranks;
  int32_t experts;  // local ones
  int32_t ring_blocks;
  int32_t minibatch_blocks;
  int32_t macrobatches;         // >= 1
  int32_t token_blocks;         // reduce tasks
  int32_t valid_slots;          // of this rank's tokens: the rows it must get back
  const int32_t* expert_rows;   // [experts], rows without padding
  const int32_t* expert_block;  // [experts + 1], first row block
  const int32_t* macro_block;   // [macrobatches + 1], first row block

  MOK_FN int32_t blocks() const { return expert_block[experts]; }
  MOK_FN int32_t expert_of(int32_t block) const { return last_not_above(expert_block, experts + 1, block); }
  MOK_FN int32_t macrobatch_of(int32_t block) const { return last_not_above(macro_block, macrobatches + 1, block); }
  MOK_FN int32_t ring_block(int32_t block) const { return block % ring_blocks; }

  // Rows of an expert's block that are not padding.
  MOK_FN int32_t real_rows(int32_t expert, int32_t block) const {
    const int64_t before = int64_t{block - expert_block[expert]} * kRowBlock;
    return static_cast<int32_t>(smaller<int64_t>(kRowBlock, expert_rows[expert] - before));
  }

  // Experts whose weight gradients belong to a macrobatch: [first_expert, end_expert). Those with rows in it, and
  // the empty ones that lie between or at its begin (after the last row: in the last macrobatch).
  MOK_FN int32_t first_expert(int32_t m) const {
    if (m == 0) return 0;
    const int32_t e = first_at_or_after(macro_block[m]);
    return e > 0 && expert_block[e] > macro_block[m] ? e - 1 : e;
  }
  MOK_FN int32_t end_expert(int32_t m) const {
    return m == macrobatches - 1 ? experts : first_at_or_after(macro_block[m + 1]);
  }

  // A piece is the part of an expert that lies in one macrobatch. Pairs (macrobatch, expert) grow together, so
  // their sum numbers the pieces without gaps that matter.
  MOK_FN int32_t piece(int32_t m, int32_t expert) const { return m + expert; }
  MOK_FN int32_t pieces() const { return macrobatches + experts - 1; }
  MOK_FN int32_t piece_of(int32_t block) const { return piece(macrobatch_of(block), expert_of(block)); }
  MOK_FN int32_t piece_begin(int32_t m, int32_t expert) const { return larger(macro_block[m], expert_block[expert]); }
  MOK_FN int32_t piece_end(int32_t m, int32_t expert) const {
    return smaller(macro_block[m + 1], expert_block[expert + 1]);
  }
  MOK_FN int32_t piece_blocks(int32_t m, int32_t expert) const {
    return larger(0, piece_end(m, expert) - piece_begin(m, expert));
  }
  MOK_FN bool begins_earlier(int32_t m, int32_t expert) const { return expert_block[expert] < macro_block[m]; }
  MOK_FN bool ends_later(int32_t m, int32_t expert) const { return expert_block[expert + 1] > macro_block[m + 1]; }

 private:
  // First expert (or `experts`) whose first row block is at or after this one.
  MOK_FN int32_t first_at_or_after(int32_t block) const {
    if (block <= 0) return 0;
    return last_not_above(expert_block, experts + 1, block - 1) + 1;
  }
};

// Makes `p` the plan of a rank whose rows are counted; cuts the macrobatches into `macro_block` [max_macrobatches + 1].
// The plan keeps the pointers.
MOK_FN void make_plan(const Shape& s, const TileCounts& tiles, Save save, int32_t valid_slots,
                      const int32_t* expert_rows, const int32_t* expert_block, int32_t* macro_block, Plan& p) {
  p.tiles = tiles;
  p.save = save;
  p.rank = static_cast<int32_t>(s.rank);
  p.ranks = static_cast<int32_t>(s.ranks);
  p.experts = static_cast<int32_t>(s.local_experts);
  p.ring_blocks = static_cast<int32_t>(s.ring_rows / kRowBlock);
  p.minibatch_blocks = static_cast<int32_t>(s.minibatch_rows / kRowBlock);
  p.macrobatches = cut_macrobatches(expert_block, p.experts, p.ring_blocks, macro_block);
  p.token_blocks = static_cast<int32_t>(ceil_div(s.tokens, kReduceTokens));
  p.valid_slots = valid_slots;
  p.expert_rows = expert_rows;
  p.expert_block = expert_block;
  p.macro_block = macro_block;
}

}  // namespace mok
