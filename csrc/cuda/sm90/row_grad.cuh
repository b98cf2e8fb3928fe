// row_grad: dgate wi_0^T + dup wi_1^T, one accumulation over both. The rows of a tile go straight to their slots, and
// with those of the first columns the router gradients.
#pragma once

#include "cuda/sm90/math.cuh"
#include "cuda/sm90/store.cuh"

namespace mok::cuda::sm90 {

class RowGrad {
 public:
  using Rank = BackwardRank;

  static constexpr int32_t kProducts = 2;  // with dgate and with dup
  __device__ static __forceinline__ int64_t depth(const Shape& s) { return s.intermediate_size; }

  __device__ static __forceinline__ void load(const Rank& rank, Shared& s, const QueuedTask& t, Loader& loader) {
    const int32_t count = t.steps / kProducts, row = t.ring_row, column = t.part * kTileColumns, expert = t.expert;
    for (int32_t which = 0; which < kProducts; ++which) {
      const CUtensorMap* weights = which ? &rank.wi_1_128 : &rank.wi_0_128;
      for (int32_t step = 0; step < count; ++step) {
        const int32_t k = step * kStepDepth;
        load_step_k_major(s.tiles, loader, weights, k, column, expert, [&](uint8_t* to, uint64_t* full) {
          tensor_load_3d(to, &rank.gate_up_grads_128, k, which, row, full);
        });
      }
    }
  }

  __device__ static __forceinline__ void epilogue(const Accumulators& acc, Shared& s, Math& math) {
    math.stage_rows(acc, s);
  }

  __device__ static __forceinline__ void store(const Rank& rank, Shared& s, const DeviceRows& arena,
                                               const QueuedTask& t, StoreSide& side) {
    push_rows(rank, arena, t, s, side);
    if (t.part == 0) push_router_grads(rank, arena, t);
  }

 private:
  // The router gradient of each row: its parts, added in order of columns.
  __device__ static __forceinline__ void push_router_grads(const Rank& rank, const DeviceRows& arena,
                                                           const QueuedTask& t) {
    for (int32_t i = lane_index(); i < t.real_rows; i += 32) {
      const float* parts = rank.router_parts + int64_t{t.ring_row + i} * rank.tiles.hidden_grad;
      float sum = 0.f;
      for (int32_t part = 0; part < rank.tiles.hidden_grad; ++part) sum += __ldcg(parts + part);
      const RowSource to = rank.row_table[t.block * kRowBlock + i];
      rank.in_arena<float>(to.rank, arena.router_grads)[to.slot] = sum;
    }
  }
};

}  // namespace mok::cuda::sm90
