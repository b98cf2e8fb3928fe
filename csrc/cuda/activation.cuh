// What an expert does between its products, on a GPU: SwiGLU with the clamps that may come before, value by value.
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

template <bool kLimited>
__device__ __forceinline__ float swiglu(float raw_gate, float raw_up, float limit) {
  const float gate = clamp_gate<kLimited>(raw_gate, limit), up = clamp_up<kLimited>(raw_up, limit);
  return __fmul_rn(__fmul_rn(gate, sigmoid(gate)), up);
}

struct SwigluGrads {
  float gate, up;  // of the pre-activations
  float hidden;    // what the forward made of them
};
// `grad` is the hidden's.
template <bool kLimited>
__device__ __forceinline__ SwigluGrads swiglu_grads(float raw_gate, float raw_up, float grad, float limit) {
  const float gate = clamp_gate<kLimited>(raw_gate, limit), up = clamp_up<kLimited>(raw_up, limit);
  const float s = sigmoid(gate), silu = __fmul_rn(gate, s);
  SwigluGrads grads;
  grads.hidden = __fmul_rn(silu, up);
  const float slope = __fmaf_rn(silu, 1.f - s, s);
  grads.gate = kLimited && raw_gate > limit ? 0.f : __fmul_rn(__fmul_rn(grad, up), slope);
  grads.up = kLimited && (raw_up > limit || raw_up < -limit) ? 0.f : __fmul_rn(grad, silu);
  return grads;
}

}  // namespace mok::cuda
