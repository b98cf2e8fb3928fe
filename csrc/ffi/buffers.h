// The buffers of a call by name, once for both platforms. Members are read in the order in which they stand, which is
// that of the tuples in mok_jax/megakernel/buffers.py: each line says what a buffer holds, what it is called, and how
// much of it executors will read or write. A change of what crosses raises INTERFACE in mok_jax/native.py.
#pragma once

#include "cuda/workspace.h"
#include "ffi/attributes.h"
#include "moe/scratch.h"

namespace mok::xla_ffi {

// Of one rank; `rank` and `minibatch_rows` are the platform's to say. Throws what no shape can have.
inline Shape shape_of(const Reader& reader, const Attributes& a, int64_t tokens, int64_t top_k, int64_t hidden,
                      int64_t intermediate, int64_t experts) {
  const int64_t here = a.virtual_ranks;
  const auto require = [&](bool holds, const char* name, int64_t value, const std::string& rule) {
    if (!holds) reader.refuse(name + (" is " + std::to_string(value)) + "; it must be " + rule);
  };
  require(a.ranks >= 1, "ranks", a.ranks, "at least 1");
  require(here == 1 || here == a.ranks, "virtual_ranks", here, "1, or all " + std::to_string(a.ranks) + " of ranks");
  require(tokens % here == 0 && experts % here == 0, "virtual_ranks", here, "a divisor of tokens and experts");
  require(a.ring_rows >= kRowBlock && a.ring_rows % kRowBlock == 0, "ring_rows", a.ring_rows,
          "a multiple of " + std::to_string(kRowBlock));
  return {.ranks = a.ranks,
          .rank = 0,
          .tokens = tokens / here,
          .top_k = top_k,
          .hidden_size = hidden,
          .intermediate_size = intermediate,
          .local_experts = experts / here,
          .ring_rows = a.ring_rows,
          .minibatch_rows = kRowBlock};
}

// What both directions are given first. T is the element of x. Arrays are of `virtual_ranks` ranks, one after another.
template <class T>
struct Operands {
  Reader& next;
  Attributes attributes{next};
  Axis tokens{}, top_k{}, hidden{}, intermediate{}, experts{};

  T* x = next.operand<T>("x", {tokens, hidden});
  int32_t* expert_ids = next.operand<int32_t>("expert_ids", {tokens, top_k});
  float* expert_weights = next.operand<float>("expert_weights", {tokens, top_k});
  T* wi_0 = next.operand<T>("wi_0", {experts, hidden, intermediate});
  T* wi_1 = next.operand<T>("wi_1", {experts, hidden, intermediate});
  T* wo = next.operand<T>("wo", {experts, intermediate, hidden});
  int32_t* where = next.operand<int32_t>("where", {2});  // the rank in its group, and the group

  Shape shape = shape_of(next, attributes, tokens, top_k, hidden, intermediate, experts);
  Save save = static_cast<Save>(attributes.save);
};

// How much there is of what the operands' sizes alone do not tell.
struct Sizes {
  int64_t ranks, rows, ring, saved_pre_activations, saved_rows, pulled, replayed, straddle, workspace;
  int64_t gate_and_up, router_parts;  // of a row

  Sizes(const Shape& s, Save save, int64_t ranks_here) : ranks(ranks_here) {
    const bool overflow = max_rows(s) > s.ring_rows;  // there can be several macrobatches
    rows = ranks * max_rows(s);
    ring = ranks * s.ring_rows;
    saved_pre_activations = save == Save::nothing ? 0 : ring;
    saved_rows = save == Save::pre_activations_and_rows ? ring : 0;
    pulled = overflow || saved_rows == 0 ? ring : 0;
    replayed = overflow || saved_pre_activations == 0 ? ring : 0;
    straddle = overflow ? ranks * straddle_elements(s.hidden_size, s.intermediate_size) : 0;
    workspace = ranks * cuda::workspace_bytes(s, ranks);
    gate_and_up = pre_activation_width(s.intermediate_size);
    router_parts = router_parts_width(s.intermediate_size);
  }
};

template <class T>
struct Forward {
  static constexpr const char* kTarget = "mok_forward";
  Reader& next;
  Operands<T> in{next};
  Sizes sizes{in.shape, in.save, in.attributes.virtual_ranks};

  T* y = next.result<T>("y", {in.tokens, in.hidden});
  RowSource* row_table = next.result<RowSource>("row_table", {sizes.rows, 2});
  int32_t* expert_rows = next.result<int32_t>("expert_rows", {in.experts});
  int32_t* bad_tokens =
      sizes.ranks == 1 ? next.result<int32_t>("bad_tokens", {}) : next.result<int32_t>("bad_tokens", {sizes.ranks});
  T* pre_activations = next.result<Bits<T>>("pre_activations", {sizes.saved_pre_activations, sizes.gate_and_up});
  T* rows = next.result<Bits<T>>("rows", {sizes.ring, in.hidden});
  T* hidden = next.result<Bits<T>>("hidden", {sizes.ring, in.intermediate});
  uint8_t* workspace = next.result<uint8_t>("workspace", {sizes.workspace});
};

template <class T>
struct Backward {
  static constexpr const char* kTarget = "mok_backward";
  Reader& next;
  Operands<T> in{next};
  Sizes sizes{in.shape, in.save, in.attributes.virtual_ranks};

  T* dy = next.operand<T>("dy", {in.tokens, in.hidden});
  RowSource* row_table = next.operand<RowSource>("row_table", {sizes.rows, 2});
  int32_t* expert_rows = next.operand<int32_t>("expert_rows", {in.experts});
  T* saved_pre_activations =
      next.operand<Bits<T>>("saved_pre_activations", {sizes.saved_pre_activations, sizes.gate_and_up});
  T* saved_rows = next.operand<Bits<T>>("saved_rows", {sizes.saved_rows, in.hidden});

  T* dx = next.result<T>("dx", {in.tokens, in.hidden});
  float* router_grads = next.result<float>("router_grads", {in.tokens, in.top_k});
  bool grads_in_f32 = next.result_type() == ffi::F32;  // of weights; else in T
  void* wi_0_grad = weight_grad("wi_0_grad", {in.experts, in.hidden, in.intermediate});
  void* wi_1_grad = weight_grad("wi_1_grad", {in.experts, in.hidden, in.intermediate});
  void* wo_grad = weight_grad("wo_grad", {in.experts, in.intermediate, in.hidden});
  T* rows = next.result<Bits<T>>("rows", {sizes.pulled, in.hidden});
  T* grads = next.result<Bits<T>>("grads", {sizes.ring, in.hidden});
  T* pre_activations = next.result<Bits<T>>("pre_activations", {sizes.replayed, sizes.gate_and_up});
  T* hidden = next.result<Bits<T>>("hidden", {sizes.ring, in.intermediate});
  T* gate_up_grads = next.result<Bits<T>>("gate_up_grads", {sizes.ring, 2 * in.intermediate});
  float* row_weights = next.result<Bits<float>>("row_weights", {sizes.ring});
  float* router_parts = next.result<Bits<float>>("router_parts", {sizes.ring, sizes.router_parts});
  float* straddle = next.result<Bits<float>>("straddle", {sizes.straddle});
  uint8_t* workspace = next.result<uint8_t>("workspace", {sizes.workspace});

 private:
  void* weight_grad(const char* name, Dimensions dimensions) {
    if (grads_in_f32) return next.result<float>(name, dimensions);
    return next.result<T>(name, dimensions);
  }
};

}  // namespace mok::xla_ffi
