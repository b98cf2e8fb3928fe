// The tile kernels of the CPU executor: what each kind of task does to memory. No waiting, no counting.
#pragma once

#include <cstddef>
#include <vector>

#include "host/activation.h"
#include "host/matmul.h"
#include "moe/arena.h"
#include "moe/program.h"
#include "moe/scratch.h"

namespace mok::host {

// Tile widths in columns. They decide only the order in which the router gradient's parts are added.
inline constexpr int64_t kGateUpColumns = kTileColumns / 2;  // of gate, and as many of up
inline constexpr int64_t kWeightGradRows = kRowBlock;

inline TileCounts tile_counts(const Shape& s) { return count_tiles(s, kTileColumns, kGateUpColumns, kColumnBands); }

// What is left of one token that a rank must reduce.
struct TokenIds {
  std::vector<int32_t> clean;  // [T * K]
  std::vector<uint8_t> bad;    // [T]
  int32_t bad_count;
};

// Memory of one call on one rank. Rings are [ring_rows, ...]; what a direction does not use is null.
template <class T>
struct Buffers {
  const T *wi_0, *wi_1, *wo;  // [E_local, H, I] twice, [E_local, I, H]
  const RowSource* row_table;
  std::vector<std::byte*> arenas;  // of every rank

  T* rows;             // [ring_rows, H]
  T* pre_activations;  // [ring_rows, 2 I], gate then up; null: not wanted
  T* hidden;           // [ring_rows, I]; in the backward times the router weight

  T* grads;             // [ring_rows, H], dy
  T* gate_up_grads;     // [ring_rows, 2 I]
  float* row_weights;   // [ring_rows]
  float* router_parts;  // [ring_rows, hidden_grad tiles]
  float* straddle;      // [2 H I + I H], accumulators of the expert that straddles a macrobatch
  const T* saved_rows;  // as `rows` and `pre_activations`, of macrobatch 0, from the forward; or null
  const T* saved_pre_activations;

  T* out;               // [T, H], y or dx
  float* router_grads;  // [T, K]
  void *wi_0_grad, *wi_1_grad, *wo_grad;
  bool grads_in_f32;  // else in T
};

// One worker's view of a call: runs any task that is not a pure signal.
template <class T>
class Tiles {
 public:
  Tiles(Direction direction, const Shape& shape, const Plan& plan, const Buffers<T>& buffers, const TokenIds& tokens,
        GatedActivation activation, TileMatmul& matmul);

  void run(const Task& task);

 private:
  void pull_rows(const Task& t);
  void pull_grads(const Task& t);
  void gate_up(const Task& t);
  void down(const Task& t);
  void hidden_grad(const Task& t);
  void row_grad(const Task& t);
  void weight_grad(const Task& t);
  void reduce(const Task& t);

  struct Span {
    int64_t begin, count;
  };
  static Span columns_of(int64_t tile, int64_t width, int64_t total) {
    return {tile * width, smaller(width, total - tile * width)};
  }
  int64_t ring_row(int64_t block) const { return plan_.ring_block(static_cast<int32_t>(block)) * kRowBlock; }
  const T* rows_of(int32_t m, int32_t block) const;
  const T* pre_activations_of(int32_t m, int32_t block) const;
  void pull(const Task& t, int64_t source_offset, T* ring);
  void push(const Task& t, int64_t rows, Span columns);
  void push_router_grads(const Task& t, int64_t rows);
  void collect_router_grads(int64_t begin, int64_t end);
  template <class V>
  V* in_arena(int64_t rank, int64_t offset) const {
    return reinterpret_cast<V*>(buffers_.arenas[rank] + offset);
  }

  bool backward_;
  const Shape& shape_;
  const Plan& plan_;
  const Buffers<T>& buffers_;
  const TokenIds& tokens_;
  GatedActivation activation_;
  ArenaLayout layout_;
  TileMatmul& matmul_;
};

}  // namespace mok::host
