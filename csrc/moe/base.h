// Small arithmetic and the one macro that lets the algorithm compile for hosts and devices alike.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define MOK_FN __host__ __device__ inline
#else
#define MOK_FN inline
#endif

namespace mok {

MOK_FN constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
MOK_FN constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }
template <class T>
MOK_FN constexpr T smaller(T a, T b) {
  return b < a ? b : a;
}
template <class T>
MOK_FN constexpr T larger(T a, T b) {
  return a < b ? b : a;
}

// Largest i in [0, count) with sorted[i] <= value; sorted[0] <= value must hold. Among equal entries the last one,
// so that in a table of first row blocks an empty expert is never found.
MOK_FN int32_t last_not_above(const int32_t* sorted, int32_t count, int32_t value) {
  int32_t low = 0, high = count;
  while (high - low > 1) {
    const int32_t middle = low + (high - low) / 2;
    if (sorted[middle] <= value) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

}  // namespace mok
