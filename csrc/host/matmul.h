// Matrix products of one tile with f32 accumulation. Every element of the result is one chain of multiply-adds in
// ascending depth, whatever its place in the tile: a row's bits do not depend on the rows beside it.
#pragma once

#include <cstdint>
#include <vector>

#include "host/element.h"

namespace mok::host {

// Element (i, j) is data[i * row_stride + j * col_stride]; one of the strides is 1.
template <class T>
struct Operand {
  const T* data;
  int64_t row_stride;
  int64_t col_stride;

  Operand at(int64_t i, int64_t j) const { return {data + i * row_stride + j * col_stride, row_stride, col_stride}; }
  Operand transposed() const { return {data, col_stride, row_stride}; }
};
template <class T>
Operand<T> row_major(const T* data, int64_t columns) {
  return {data, columns, 1};
}

// One worker's accumulators and panels. Usage: begin(), any number of add(), then row().
class TileMatmul {
 public:
  static constexpr int64_t kDepth = 256;  // depth of a panel; no effect on results

  // Zeroes a tile of rows x columns accumulators.
  void begin(int64_t rows, int64_t columns);

  // accumulators[:, column : column + columns] += a [rows, depth] @ b [depth, columns].
  // `column` must be a multiple of aligned(1).
  template <class T>
  void add(Operand<T> a, Operand<T> b, int64_t depth, int64_t columns, int64_t column = 0);

  float* row(int64_t i) { return accumulators_.data() + i * stride_; }

  // Columns rounded up to what a panel holds.
  static int64_t aligned(int64_t columns);

 private:
  std::vector<float> accumulators_, a_panel_, b_panel_;
  int64_t rows_ = 0, stride_ = 0;
};

}  // namespace mok::host
