#include "host/tiles.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>

namespace mok::host {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

template <class T>
void store(const float* from, int64_t n, T* to) {
  for (int64_t i = 0; i < n; ++i) to[i] = from_float<T>(from[i]);
}
template <class T>
void load(const T* from, int64_t n, float* to) {
  for (int64_t i = 0; i < n; ++i) to[i] = to_float(from[i]);
}

// One of an expert's three weight gradients = left^T right over the expert's rows, and the tile of it that a part is.
struct WeightGradTile {
  enum Matrix { kWi0, kWi1, kWo } matrix;
  int64_t row, column, rows, columns;  // the tile
  int64_t height, width;               // the matrix
  int64_t straddle;                    // offset of the matrix in the straddle scratch
};

WeightGradTile weight_grad_tile(const Shape& s, int64_t part) {
  const int64_t size = s.hidden_size * s.intermediate_size;
  for (auto matrix : {WeightGradTile::kWi0, WeightGradTile::kWi1, WeightGradTile::kWo}) {
    const int64_t height = matrix == WeightGradTile::kWo ? s.intermediate_size : s.hidden_size;
    const int64_t width = matrix == WeightGradTile::kWo ? s.hidden_size : s.intermediate_size;
    const int64_t across = ceil_div(width, kTileColumns), tiles = across * ceil_div(height, kWeightGradRows);
    if (part < tiles || matrix == WeightGradTile::kWo) {
      const int64_t row = part / across * kWeightGradRows, column = part % across * kTileColumns;
      return {
          matrix, row,   column,       smaller(kWeightGradRows, height - row), smaller(kTileColumns, width - column),
          height, width, matrix * size};
    }
    part -= tiles;
  }
  return {};
}

}  // namespace

template <class T>
Tiles<T>::Tiles(Direction direction, const Shape& shape, const Plan& plan, const Buffers<T>& buffers,
                const TokenIds& tokens, GatedActivation activation, TileMatmul& matmul)
    : backward_(direction == Direction::backward),
      shape_(shape),
      plan_(plan),
      buffers_(buffers),
      tokens_(tokens),
      activation_(activation),
      layout_(shape, sizeof(T)),
      matmul_(matmul) {}

template <class T>
void Tiles<T>::run(const Task& task) {
  switch (task.kind) {
    case TaskKind::pull_rows:
      return pull_rows(task);
    case TaskKind::pull_grads:
      return pull_grads(task);
    case TaskKind::gate_up:
      return gate_up(task);
    case TaskKind::down:
      return down(task);
    case TaskKind::hidden_grad:
      return hidden_grad(task);
    case TaskKind::row_grad:
      return row_grad(task);
    case TaskKind::weight_grad:
      return weight_grad(task);
    case TaskKind::reduce:
      return reduce(task);
    case TaskKind::notify:
      return;  // its signals are all it does
  }
}

template <class T>
const T* Tiles<T>::rows_of(int32_t m, int32_t block) const {
  return (m == 0 && buffers_.saved_rows ? buffers_.saved_rows : buffers_.rows) + ring_row(block) * shape_.hidden_size;
}

template <class T>
const T* Tiles<T>::pre_activations_of(int32_t m, int32_t block) const {
  const T* ring = m == 0 && buffers_.saved_pre_activations ? buffers_.saved_pre_activations : buffers_.pre_activations;
  return ring + ring_row(block) * 2 * shape_.intermediate_size;
}

// Copies the rows of a pull task from their source ranks. Padding rows are never read, so they are not written.
template <class T>
void Tiles<T>::pull(const Task& t, int64_t source_offset, T* ring) {
  const int64_t h = shape_.hidden_size;
  const Range rows = pulled_rows(t);
  for (int32_t i = rows.begin; i < smaller(rows.end, plan_.real_rows(t.expert, t.block)); ++i) {
    const RowSource source = buffers_.row_table[t.block * kRowBlock + i];
    const T* from = in_arena<T>(source.rank, source_offset) + source.slot / shape_.top_k * h;
    std::memcpy(ring + (ring_row(t.block) + i) * h, from, h * sizeof(T));
    if (source_offset == layout_.dy) {
      buffers_.row_weights[ring_row(t.block) + i] = in_arena<float>(source.rank, layout_.weights)[source.slot];
    }
  }
}

template <class T>
void Tiles<T>::pull_rows(const Task& t) {
  pull(t, layout_.x, buffers_.rows);
}

template <class T>
void Tiles<T>::pull_grads(const Task& t) {
  pull(t, layout_.dy, buffers_.grads);
}

// Pre-activations (kept where wanted, rounded), and from the unrounded ones the hidden rows. The backward's replay
// wants the pre-activations alone.
template <class T>
void Tiles<T>::gate_up(const Task& t) {
  const int64_t h = shape_.hidden_size, inner = shape_.intermediate_size, rows = plan_.real_rows(t.expert, t.block);
  const auto [column, width] = columns_of(t.part, kGateUpColumns, inner);
  const int64_t up_column = TileMatmul::aligned(width), weights = t.expert * h * inner;
  const auto x = row_major(rows_of(t.macrobatch, t.block), h);
  matmul_.begin(rows, 2 * up_column);
  matmul_.add(x, row_major(buffers_.wi_0 + weights, inner).at(0, column), h, width);
  matmul_.add(x, row_major(buffers_.wi_1 + weights, inner).at(0, column), h, width, up_column);

  const bool keep = buffers_.pre_activations && (backward_ || t.macrobatch == 0);
  std::array<float, kGateUpColumns> hidden;
  for (int64_t i = 0; i < rows; ++i) {
    const float *gate = matmul_.row(i), *up = gate + up_column;
    const int64_t at = ring_row(t.block) + i;
    if (keep) {
      T* out = buffers_.pre_activations + at * 2 * inner + column;
      store(gate, width, out);
      store(up, width, out + inner);
    }
    if (!backward_) {
      activation_.visit([&](auto gated) { gated.forward(gate, up, width, hidden.data()); });
      store(hidden.data(), width, buffers_.hidden + at * inner + column);
    }
  }
}

// The accumulated columns of each row go to its slot at its source.
template <class T>
void Tiles<T>::push(const Task& t, int64_t rows, Span columns) {
  for (int64_t i = 0; i < rows; ++i) {
    const RowSource source = buffers_.row_table[t.block * kRowBlock + i];
    T* slot = in_arena<T>(source.rank, layout_.slots) + source.slot * shape_.hidden_size;
    store(matmul_.row(i), columns.count, slot + columns.begin);
  }
}

template <class T>
void Tiles<T>::down(const Task& t) {
  const int64_t h = shape_.hidden_size, inner = shape_.intermediate_size, rows = plan_.real_rows(t.expert, t.block);
  const Span columns = columns_of(t.part, kTileColumns, h);
  matmul_.begin(rows, columns.count);
  matmul_.add(row_major(static_cast<const T*>(buffers_.hidden) + ring_row(t.block) * inner, inner),
              row_major(buffers_.wo + t.expert * inner * h, h).at(0, columns.begin), inner, columns.count);
  push(t, rows, columns);
}

template <class T>
void Tiles<T>::hidden_grad(const Task& t) {
  const int64_t h = shape_.hidden_size, inner = shape_.intermediate_size, rows = plan_.real_rows(t.expert, t.block);
  const auto [column, width] = columns_of(t.part, kTileColumns, inner);
  matmul_.begin(rows, width);
  matmul_.add(row_major(static_cast<const T*>(buffers_.grads) + ring_row(t.block) * h, h),
              row_major(buffers_.wo + t.expert * inner * h, h).at(column, 0).transposed(), h, width);

  std::array<float, kTileColumns> gate, up, gate_grad, up_grad, weighted, hidden;
  for (int64_t i = 0; i < rows; ++i) {
    const T* pre = pre_activations_of(t.macrobatch, t.block) + i * 2 * inner + column;
    load(pre, width, gate.data());
    load(pre + inner, width, up.data());
    const int64_t at = ring_row(t.block) + i;
    activation_.visit([&](auto gated) {
      gated.backward(gate.data(), up.data(), matmul_.row(i), buffers_.row_weights[at], width, gate_grad.data(),
                     up_grad.data(), weighted.data(), hidden.data());
    });
    T* grads = buffers_.gate_up_grads + at * 2 * inner + column;
    store(gate_grad.data(), width, grads);
    store(up_grad.data(), width, grads + inner);
    store(weighted.data(), width, buffers_.hidden + at * inner + column);
    buffers_.router_parts[at * plan_.tiles.hidden_grad + t.part] = dot(matmul_.row(i), hidden.data(), width);
  }
}

template <class T>
void Tiles<T>::push_router_grads(const Task& t, int64_t rows) {
  for (int64_t i = 0; i < rows; ++i) {
    const float* parts = buffers_.router_parts + (ring_row(t.block) + i) * plan_.tiles.hidden_grad;
    float sum = 0.f;
    for (int32_t part = 0; part < plan_.tiles.hidden_grad; ++part) sum += parts[part];
    const RowSource source = buffers_.row_table[t.block * kRowBlock + i];
    in_arena<float>(source.rank, layout_.router_grads)[source.slot] = sum;
  }
}

template <class T>
void Tiles<T>::row_grad(const Task& t) {
  const int64_t h = shape_.hidden_size, inner = shape_.intermediate_size, rows = plan_.real_rows(t.expert, t.block);
  const Span columns = columns_of(t.part, kTileColumns, h);
  const int64_t weights = t.expert * h * inner;
  const auto grads =
      row_major(static_cast<const T*>(buffers_.gate_up_grads) + ring_row(t.block) * 2 * inner, 2 * inner);
  matmul_.begin(rows, columns.count);
  matmul_.add(grads, row_major(buffers_.wi_0 + weights, inner).at(columns.begin, 0).transposed(), inner, columns.count);
  matmul_.add(grads.at(0, inner), row_major(buffers_.wi_1 + weights, inner).at(columns.begin, 0).transposed(), inner,
              columns.count);
  push(t, rows, columns);
  if (t.part == 0) push_router_grads(t, rows);
}

template <class T>
void Tiles<T>::weight_grad(const Task& t) {
  const int64_t h = shape_.hidden_size, inner = shape_.intermediate_size;
  const WeightGradTile tile = weight_grad_tile(shape_, t.part);
  float* scratch = buffers_.straddle + tile.straddle + tile.row * tile.width + tile.column;
  matmul_.begin(tile.rows, tile.columns);
  if (plan_.begins_earlier(t.macrobatch, t.expert)) {
    for (int64_t i = 0; i < tile.rows; ++i) std::copy_n(scratch + i * tile.width, tile.columns, matmul_.row(i));
  }
  for (int32_t block = t.block; block < t.block + t.blocks; ++block) {
    const int64_t row = ring_row(block), depth = plan_.real_rows(t.expert, block);
    Operand<T> left = row_major(rows_of(t.macrobatch, block), h);
    Operand<T> right = row_major(static_cast<const T*>(buffers_.gate_up_grads) + row * 2 * inner, 2 * inner);
    if (tile.matrix == WeightGradTile::kWi1) right = right.at(0, inner);
    if (tile.matrix == WeightGradTile::kWo) {
      left = row_major(static_cast<const T*>(buffers_.hidden) + row * inner, inner);
      right = row_major(static_cast<const T*>(buffers_.grads) + row * h, h);
    }
    matmul_.add(left.at(0, tile.row).transposed(), right.at(0, tile.column), depth, tile.columns);
  }
  if (plan_.ends_later(t.macrobatch, t.expert)) {
    for (int64_t i = 0; i < tile.rows; ++i) std::copy_n(matmul_.row(i), tile.columns, scratch + i * tile.width);
    return;
  }
  void* out[] = {buffers_.wi_0_grad, buffers_.wi_1_grad, buffers_.wo_grad};
  for (int64_t i = 0; i < tile.rows; ++i) {
    const int64_t at = (t.expert * tile.height + tile.row + i) * tile.width + tile.column;
    if (buffers_.grads_in_f32) {
      store(matmul_.row(i), tile.columns, static_cast<float*>(out[tile.matrix]) + at);
    } else {
      store(matmul_.row(i), tile.columns, static_cast<T*>(out[tile.matrix]) + at);
    }
  }
}

// A band of columns of y[t] = sum over k, ascending, of weight * slot, or of dx[t] = sum of the slots, which have
// their weights already; empty slots are skipped, bad tokens are NaN.
template <class T>
void Tiles<T>::reduce(const Task& t) {
  const int64_t h = shape_.hidden_size, k_count = shape_.top_k;
  const Range tiles = (backward_ ? row_grad_bands(plan_.tiles) : down_bands(plan_.tiles)).of(t.part);
  const int64_t first = tiles.begin * kTileColumns, count = smaller(tiles.end * kTileColumns, h) - first;
  const T* slots = in_arena<T>(plan_.rank, layout_.slots) + first;
  const float* weights = in_arena<float>(plan_.rank, layout_.weights);
  std::vector<float> sum(count);
  const int64_t begin = t.block * kReduceTokens, end = smaller(begin + kReduceTokens, shape_.tokens);
  for (int64_t token = begin; token < end; ++token) {
    std::fill(sum.begin(), sum.end(), tokens_.bad[token] ? kNaN : 0.f);
    for (int64_t slot = token * k_count; slot < (token + 1) * k_count; ++slot) {
      if (tokens_.clean[slot] < 0) continue;
      const float weight = backward_ ? 1.f : weights[slot];
      for (int64_t i = 0; i < count; ++i) sum[i] += weight * to_float(slots[slot * h + i]);
    }
    store(sum.data(), count, buffers_.out + token * h + first);
  }
  if (backward_ && t.part == 0) collect_router_grads(begin * k_count, end * k_count);
}

// As they came; of empty slots 0, of bad tokens NaN.
template <class T>
void Tiles<T>::collect_router_grads(int64_t begin, int64_t end) {
  const float* returned = in_arena<float>(plan_.rank, layout_.router_grads);
  for (int64_t slot = begin; slot < end; ++slot) {
    const bool bad = tokens_.bad[slot / shape_.top_k], empty = tokens_.clean[slot] < 0;
    buffers_.router_grads[slot] = bad ? kNaN : empty ? 0.f : returned[slot];
  }
}

template class Tiles<float>;
template class Tiles<BFloat16>;

}  // namespace mok::host
