#include "cuda/sm90/tensor_maps.h"

#include <vector>

#include "cuda/runtime/arguments.h"
#include "cuda/runtime/tensor_map.h"

namespace mok::cuda::sm90 {
namespace {

using Dimensions = std::vector<cuuint64_t>;  // the innermost one first

cuuint64_t u64(int64_t n) { return static_cast<cuuint64_t>(n); }

// Makes maps, and remembers whether all could be made. Boxes are 128 bytes wide, as wide as the swizzle.
struct Maker {
  bool good = true;

  // Boxes of `rows` of dimension `of`.
  void bf16s(CUtensorMap& map, const bf16* data, const Dimensions& dims, int32_t rows, size_t of = 1) {
    if (data) make(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, data, dims, rows, of);
  }
  void grads(CUtensorMap& map, const void* data, bool f32, const Dimensions& dims) {
    make(map, f32 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, data, dims, 64, 1);
  }

 private:
  void make(CUtensorMap& map, CUtensorMapDataType type, const void* data, const Dimensions& dims, int32_t rows,
            size_t of) {
    good = encode(map, type, data, dims, 128, rows, of) && good;
  }
};

// The weights of one rank's experts, and how large its arrays are.
struct Arrays {
  const bf16 *wi_0, *wi_1, *wo;
  Dimensions wide, narrow, pair;  // [ring_rows, H], [ring_rows, I], [ring_rows, 2, I]
  Dimensions like_wi, like_wo;    // [E_local, H, I], [E_local, I, H]

  Arrays(const Call& c, int32_t i) {
    const int64_t h = c.shape.hidden, inner = c.shape.intermediate, e = c.shape.local_experts;
    wi_0 = nth(c.wi_0, i, e * h * inner);
    wi_1 = nth(c.wi_1, i, e * h * inner);
    wo = nth(c.wo, i, e * h * inner);
    wide = {u64(h), u64(c.shape.ring_rows)};
    narrow = {u64(inner), u64(c.shape.ring_rows)};
    pair = {u64(inner), 2, u64(c.shape.ring_rows)};
    like_wi = {u64(inner), u64(h), u64(e)};
    like_wo = {u64(h), u64(inner), u64(e)};
  }
};

}  // namespace

bool make_tensor_maps(const ForwardCall& c, int32_t i, ForwardRank& rank) {
  const Arrays a(c, i);
  Maker maker;
  maker.bf16s(rank.rows_128, rank.rows, a.wide, 128);
  maker.bf16s(rank.hidden_128, rank.hidden, a.narrow, 128);
  maker.bf16s(rank.wi_0_64, a.wi_0, a.like_wi, 64);
  maker.bf16s(rank.wi_1_64, a.wi_1, a.like_wi, 64);
  maker.bf16s(rank.wo_64, a.wo, a.like_wo, 64);
  maker.bf16s(rank.hidden_64, rank.hidden, a.narrow, 64);
  return maker.good;
}

bool make_tensor_maps(const BackwardCall& c, int32_t i, BackwardRank& rank) {
  const Arrays a(c, i);
  const bf16* gate_up_grads = nth(c.gate_up_grads, i, c.shape.ring_rows * 2 * c.shape.intermediate);
  const bf16* saved_rows = nth(c.saved_rows, i, c.shape.ring_rows * c.shape.hidden);
  Maker maker;
  maker.bf16s(rank.rows_128, rank.rows, a.wide, 128);
  maker.bf16s(rank.wi_0_64, a.wi_0, a.like_wi, 64);
  maker.bf16s(rank.wi_1_64, a.wi_1, a.like_wi, 64);
  maker.bf16s(rank.grads_128, rank.grads, a.wide, 128);
  maker.bf16s(rank.wo_128, a.wo, a.like_wo, 128);
  maker.bf16s(rank.gate_up_grads_128, gate_up_grads, a.pair, 128, 2);
  maker.bf16s(rank.hidden_128, rank.hidden, a.narrow, 128);
  maker.bf16s(rank.wi_0_128, a.wi_0, a.like_wi, 128);
  maker.bf16s(rank.wi_1_128, a.wi_1, a.like_wi, 128);
  maker.bf16s(rank.rows_64, rank.rows, a.wide, 64);
  maker.bf16s(rank.saved_rows_64, saved_rows, a.wide, 64);
  maker.bf16s(rank.grads_64, rank.grads, a.wide, 64);
  maker.bf16s(rank.gate_up_grads_64, gate_up_grads, a.pair, 64, 2);
  maker.bf16s(rank.hidden_64, rank.hidden, a.narrow, 64);
  maker.grads(rank.wi_0_grad_64, rank.wi_0_grad, c.grads_in_f32, a.like_wi);
  maker.grads(rank.wi_1_grad_64, rank.wi_1_grad, c.grads_in_f32, a.like_wi);
  maker.grads(rank.wo_grad_64, rank.wo_grad, c.grads_in_f32, a.like_wo);
  return maker.good;
}

}  // namespace mok::cuda::sm90
