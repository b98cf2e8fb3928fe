// What an expert does between its two products. Gate and up are clamped first where the call has a limit L > 0: the
// gate from above to L, up to [-L, L], and no gradient passes where that changes a value; NaN passes through every
// clamp.
#pragma once

#include <cstdint>

namespace mok {

enum class Activation : int32_t {
  swiglu = 0,   // silu(gate) * up
  gpt_oss = 1,  // gate * sigmoid(kGptOssSlope * gate) * (up + 1)
};

inline constexpr float kGptOssSlope = 1.702f;

}  // namespace mok
