// Element types of the CPU executor: float, and bfloat16 with conversions that compilers vectorise.
#pragma once

#include <bit>
#include <cstdint>

namespace mok::host {

struct BFloat16 {
  uint16_t bits;
};

inline float to_float(float value) { return value; }
inline float to_float(BFloat16 value) { return std::bit_cast<float>(uint32_t{value.bits} << 16); }

template <class T>
T from_float(float value);

template <>
inline float from_float<float>(float value) {
  return value;
}

// Round to nearest, ties to even; NaN stays NaN.
template <>
inline BFloat16 from_float<BFloat16>(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t quiet_nan = (bits >> 16) | 0x40u;
  return {static_cast<uint16_t>(value != value ? quiet_nan : rounded)};
}

}  // namespace mok::host
