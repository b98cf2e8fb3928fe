// What an expert does between its products, on a GPU: the sigmoid, and the clamps that may come before.
#pragma once

namespace mok::cuda {

inline constexpr float kInfinity = __builtin_huge_valf();  // as an activation limit: none

// 1 / (1 + exp(-x)); exp and the reciprocal are the hardware's, good to about 2 units in the last place.
__device__ __forceinline__ float sigmoid(float x) {
  float e, r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(__fmul_rn(x, -1.4426950408889634f)));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(__fadd_rn(1.f, e)));
  return r;
}

// The clamps of an activation limit; without one they cost nothing.
template <bool kLimited>
__device__ __forceinline__ float clamp_gate(float gate, float limit) {
  return kLimited && gate > limit ? limit : gate;
}
template <bool kLimited>
__device__ __forceinline__ float clamp_up(float up, float limit) {
  if (!kLimited) return up;
  return up > limit ? limit : up < -limit ? -limit : up;
}

}  // namespace mok::cuda
