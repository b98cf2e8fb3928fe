#include "host/matmul.h"

#include <algorithm>

namespace mok::host {
namespace {

// A micro-tile of kRows x (kVectors * kLanes) accumulators fills the registers of the instruction set.
#if defined(__AVX512F__)
constexpr int kLanes = 16, kVectors = 2, kRows = 8;
#elif defined(__AVX2__)
constexpr int kLanes = 8, kVectors = 3, kRows = 4;
#else
constexpr int kLanes = 4, kVectors = 2, kRows = 6;
#endif
constexpr int64_t kColumns = kLanes * kVectors;

typedef float Vector __attribute__((vector_size(kLanes * sizeof(float)), aligned(4), may_alias));

// c [R, kColumns] += a [R, depth] @ b [depth, kColumns], b packed.
template <int R>
void micro_tile(const float* a, int64_t row_stride, int64_t depth_stride, const float* b, int64_t depth, float* c,
                int64_t c_stride) {
  Vector sum[R][kVectors];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) sum[r][v] = *reinterpret_cast<const Vector*>(c + r * c_stride + v * kLanes);
  }
  for (int64_t k = 0; k < depth; ++k, a += depth_stride, b += kColumns) {
    Vector right[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) right[v] = *reinterpret_cast<const Vector*>(b + v * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const float left = a[r * row_stride];
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sum[r][v] += left * right[v];
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) *reinterpret_cast<Vector*>(c + r * c_stride + v * kLanes) = sum[r][v];
  }
}

using MicroTile = void (*)(const float*, int64_t, int64_t, const float*, int64_t, float*, int64_t);
constexpr MicroTile kMicroTiles[] = {micro_tile<1>, micro_tile<2>, micro_tile<3>, micro_tile<4>,
                                     micro_tile<5>, micro_tile<6>, micro_tile<7>, micro_tile<8>};

// Columns [0, columns) of b as panels of kColumns, zero-filled, each [depth, kColumns].
template <class T>
void pack_columns(Operand<T> b, int64_t depth, int64_t columns, float* out) {
  for (int64_t begin = 0; begin < columns; begin += kColumns) {
    const int64_t width = std::min(kColumns, columns - begin);
    const T* from = b.data + begin * b.col_stride;
    if (width < kColumns) std::fill(out, out + depth * kColumns, 0.f);
    if (b.col_stride == 1) {
      for (int64_t k = 0; k < depth; ++k) {
        for (int64_t j = 0; j < width; ++j) out[k * kColumns + j] = to_float(from[k * b.row_stride + j]);
      }
    } else {
      for (int64_t j = 0; j < width; ++j) {
        for (int64_t k = 0; k < depth; ++k) out[k * kColumns + j] = to_float(from[k * b.row_stride + j * b.col_stride]);
      }
    }
    out += depth * kColumns;
  }
}

// The same matrix in f32: itself, or a converted copy in the same order of memory.
Operand<float> as_float(Operand<float> a, int64_t, int64_t, std::vector<float>&) { return a; }
Operand<float> as_float(Operand<BFloat16> a, int64_t rows, int64_t depth, std::vector<float>& panel) {
  const bool by_row = a.col_stride == 1;
  const int64_t outer = by_row ? rows : depth, inner = by_row ? depth : rows;
  const int64_t stride = by_row ? a.row_stride : a.col_stride;
  panel.resize(std::max<size_t>(panel.size(), outer * inner));
  for (int64_t i = 0; i < outer; ++i) {
    for (int64_t j = 0; j < inner; ++j) panel[i * inner + j] = to_float(a.data[i * stride + j]);
  }
  return by_row ? Operand<float>{panel.data(), inner, 1} : Operand<float>{panel.data(), 1, inner};
}

}  // namespace

int64_t TileMatmul::aligned(int64_t columns) { return (columns + kColumns - 1) / kColumns * kColumns; }

void TileMatmul::begin(int64_t rows, int64_t columns) {
  rows_ = rows;
  stride_ = aligned(columns);
  accumulators_.assign(rows * stride_, 0.f);
}

template <class T>
void TileMatmul::add(Operand<T> a, Operand<T> b, int64_t depth, int64_t columns, int64_t column) {
  b_panel_.resize(std::max<size_t>(b_panel_.size(), kDepth * aligned(columns)));
  for (int64_t begin = 0; begin < depth; begin += kDepth) {
    const int64_t count = std::min(kDepth, depth - begin);
    pack_columns(b.at(begin, 0), count, columns, b_panel_.data());
    const Operand<float> left = as_float(a.at(0, begin), rows_, count, a_panel_);
    for (int64_t j = 0; j < columns; j += kColumns) {
      for (int64_t i = 0; i < rows_; i += kRows) {
        const int64_t height = std::min<int64_t>(kRows, rows_ - i);
        kMicroTiles[height - 1](left.data + i * left.row_stride, left.row_stride, left.col_stride,
                                b_panel_.data() + j * count, count, row(i) + column + j, stride_);
      }
    }
  }
}

template void TileMatmul::add(Operand<float>, Operand<float>, int64_t, int64_t, int64_t);
template void TileMatmul::add(Operand<BFloat16>, Operand<BFloat16>, int64_t, int64_t, int64_t);

}  // namespace mok::host
