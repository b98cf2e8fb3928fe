// Activations and their derivatives on rows of f32, written so that compilers vectorise the loops.
#pragma once

#include <bit>
#include <cstdint>

#include "moe/activation.h"

namespace mok::host {

// exp for |x| <= 88, clamped beyond; 2^n * polynomial on [-ln2 / 2, ln2 / 2] (Cephes expf), error about 1 ulp.
inline float fast_exp(float x) {
  constexpr float kShift = 12582912.f;  // 1.5 * 2^23: adding it rounds to an integer in the low mantissa bits
  x = x < -88.f ? -88.f : x;
  x = x > 88.f ? 88.f : x;
  const float shifted = x * 1.44269504f + kShift;
  const float n = shifted - kShift;
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.f;
  const uint32_t exponent = std::bit_cast<uint32_t>(shifted) - std::bit_cast<uint32_t>(kShift) + 127u;
  return p * std::bit_cast<float>(exponent << 23);
}

inline float sigmoid(float x) { return 1.f / (1.f + fast_exp(-x)); }

// hidden = gate * sigmoid(scaled(gate)) * shifted(up): for SwiGLU neither does anything.
template <Activation kind>
struct Gated {
  float limit;  // infinity: none

  static float scaled(float x) { return kind == Activation::gpt_oss ? kGptOssSlope * x : x; }
  static float shifted(float up) { return kind == Activation::gpt_oss ? up + 1.f : up; }
  float clamp_gate(float gate) const { return gate > limit ? limit : gate; }
  float clamp_up(float up) const { return up > limit ? limit : up < -limit ? -limit : up; }

  void forward(const float* gate, const float* up, int64_t n, float* hidden) const {
    for (int64_t i = 0; i < n; ++i) {
      const float g = clamp_gate(gate[i]);
      hidden[i] = g * sigmoid(scaled(g)) * shifted(clamp_up(up[i]));
    }
  }

  // From the gradient of the unweighted output, `hidden_grad` = dy wo^T, and the router weight w of the row:
  // dgate and dup of the weighted output, and w * hidden. `hidden` is left for the router gradient.
  void backward(const float* gate, const float* up, const float* hidden_grad, float w, int64_t n, float* gate_grad,
                float* up_grad, float* weighted_hidden, float* hidden) const {
    for (int64_t i = 0; i < n; ++i) {
      const float g = clamp_gate(gate[i]), u = shifted(clamp_up(up[i]));
      const float s = sigmoid(scaled(g)), swish = g * s;
      const float grad = w * hidden_grad[i];
      const float slope = s + scaled(swish) * (1.f - s);
      hidden[i] = swish * u;
      weighted_hidden[i] = w * hidden[i];
      gate_grad[i] = gate[i] > limit ? 0.f : grad * u * slope;
      up_grad[i] = up[i] > limit || up[i] < -limit ? 0.f : grad * swish;
    }
  }
};

// The activation of a call. It branches once a row, outside the loops.
struct GatedActivation {
  Activation kind;
  float limit;

  template <class Visit>
  void visit(const Visit& visit) const {
    if (kind == Activation::gpt_oss) return visit(Gated<Activation::gpt_oss>{limit});
    visit(Gated<Activation::swiglu>{limit});
  }
};

// Sum of a[i] * b[i] in a fixed order: 16 interleaved chains, then the chains in order.
inline float dot(const float* a, const float* b, int64_t n) {
  constexpr int kChains = 16;
  float chains[kChains] = {};
  int64_t i = 0;
  for (; i + kChains <= n; i += kChains) {
    for (int c = 0; c < kChains; ++c) chains[c] += a[i + c] * b[i + c];
  }
  for (int c = 0; i < n; ++i, ++c) chains[c] += a[i] * b[i];
  float sum = 0.f;
  for (float chain : chains) sum += chain;
  return sum;
}

}  // namespace mok::host
