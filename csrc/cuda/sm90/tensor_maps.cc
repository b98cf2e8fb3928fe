#include "cuda/sm90/tensor_maps.h"

#include <vector>

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

// How large a rank's arrays are.
struct Arrays {
  Dimensions wide, narrow, pair;  // [ring_rows, H], [ring_rows, I], [ring_rows, 2, I]
  Dimensions like_wi, like_wo;    // [E_local, H, I], [E_local, I, H]

  explicit Arrays(const Shape& s)
      : wide{u64(s.hidden_size), u64(s.ring_rows)},
        narrow{u64(s.intermediate_size), u64(s.ring_rows)},
        pair{u64(s.intermediate_size), 2, u64(s.ring_rows)},
        like_wi{u64(s.intermediate_size), u64(s.hidden_size), u64(s.local_experts)},
        like_wo{u64(s.hidden_size), u64(s.intermediate_size), u64(s.local_experts)} {}
};

}  // namespace

bool make_tensor_maps(ForwardRank& r) {
  const Arrays a(r.shape);
  Maker maker;
  maker.bf16s(r.rows_128, r.rows, a.wide, 128);
  maker.bf16s(r.hidden_128, r.hidden, a.narrow, 128);
  maker.bf16s(r.wi_0_64, r.wi_0, a.like_wi, 64);
  maker.bf16s(r.wi_1_64, r.wi_1, a.like_wi, 64);
  maker.bf16s(r.wo_64, r.wo, a.like_wo, 64);
  maker.bf16s(r.hidden_64, r.hidden, a.narrow, 64);
  return maker.good;
}

bool make_tensor_maps(BackwardRank& r) {
  const Arrays a(r.shape);
  Maker maker;
  maker.bf16s(r.rows_128, r.rows, a.wide, 128);
  maker.bf16s(r.wi_0_64, r.wi_0, a.like_wi, 64);
  maker.bf16s(r.wi_1_64, r.wi_1, a.like_wi, 64);
  maker.bf16s(r.grads_128, r.grads, a.wide, 128);
  maker.bf16s(r.wo_128, r.wo, a.like_wo, 128);
  maker.bf16s(r.gate_up_grads_128, r.gate_up_grads, a.pair, 128, 2);
  maker.bf16s(r.hidden_128, r.hidden, a.narrow, 128);
  maker.bf16s(r.wi_0_128, r.wi_0, a.like_wi, 128);
  maker.bf16s(r.wi_1_128, r.wi_1, a.like_wi, 128);
  maker.bf16s(r.rows_64, r.rows, a.wide, 64);
  maker.bf16s(r.saved_rows_64, r.saved_rows, a.wide, 64);
  maker.bf16s(r.grads_64, r.grads, a.wide, 64);
  maker.bf16s(r.gate_up_grads_64, r.gate_up_grads, a.pair, 64, 2);
  maker.bf16s(r.hidden_64, r.hidden, a.narrow, 64);
  maker.grads(r.wi_0_grad_64, r.wi_0_grad, r.grads_in_f32, a.like_wi);
  maker.grads(r.wi_1_grad_64, r.wi_1_grad, r.grads_in_f32, a.like_wi);
  maker.grads(r.wo_grad_64, r.wo_grad, r.grads_in_f32, a.like_wo);
  return maker.good;
}

}  // namespace mok::cuda::sm90
