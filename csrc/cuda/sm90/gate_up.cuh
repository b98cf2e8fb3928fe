// gate_up: [128 rows, 128 columns of gate | the same 128 of up] = rows @ (wi_0 | wi_1). A thread holds a gate column
// and its up column, so SwiGLU needs no interleaved weights. The forward's tile, and the backward's replay.
#pragma once

#include "cuda/activation.cuh"
#include "cuda/sm90/math.cuh"
#include "cuda/sm90/pre_activations.cuh"
#include "cuda/sm90/store.cuh"

namespace mok::cuda::sm90 {

// What the forward and the replay have in common. R has rows_128, wi_0_64, wi_1_64.
template <class R>
struct GateUpProduct {
  using Rank = R;

  __device__ static __forceinline__ int64_t depth(const Shape& s) { return s.hidden_size; }

  __device__ static __forceinline__ void load(const R& rank, Shared& s, const QueuedTask& t, Loader& loader) {
    const int32_t steps = t.steps, row = t.ring_row, column = t.part * kGateUpColumns, expert = t.expert;
    for (int32_t step = 0; step < steps; ++step) {
      const int32_t k = step * kStepDepth;
      loader.step(
          s.tiles, [&](uint8_t* to, uint64_t* full) { tensor_load_2d(to, &rank.rows_128, k, row, full); },
          [&](int32_t half, uint8_t* to, uint64_t* full, bool both) {
            const CUtensorMap* weights = half ? &rank.wi_1_64 : &rank.wi_0_64;
            load_3d(to, weights, column, k, expert, full, both);
            load_3d(to + kBoxBytes, weights, column + kBoxColumns, k, expert, full, both);
          });
    }
  }
};

class GateUp : public GateUpProduct<ForwardRank> {
 public:
  // What the epilogue needs, known by the end of the product.
  struct Known {
    float limit;
    bf16* saved;  // null: not this tile
  };
  __device__ static __forceinline__ Known begin(const Rank& rank, const QueuedTask& t) {
    return {rank.activation_limit, t.macrobatch == 0 ? rank.pre_activations : nullptr};
  }

  __device__ static __forceinline__ void epilogue(const Accumulators& acc, const Known& known, const Rank& rank,
                                                  Shared& s, const QueuedTask& t, Math& math) {
    if (known.saved) store_pre_activations(acc, pre_activation_tile(known.saved, rank, t.ring_row, t.part));
    known.limit < kInfinity ? stage_hidden<true>(acc, known.limit, s, math)
                            : stage_hidden<false>(acc, known.limit, s, math);
  }

  __device__ static __forceinline__ void store(const Rank& rank, Shared& s, const QueuedTask& t, StoreSide& side) {
    for (int32_t warpgroup = 0; warpgroup < 2; ++warpgroup) {
      const uint8_t* staged = side.acquire(s.tiles, warpgroup);
      if (lane_index() < kGateUpColumns / kBoxColumns && warpgroup * kWarpgroupRows < t.real_rows) {
        const int32_t column = t.part * kGateUpColumns + lane_index() * kBoxColumns;
        tensor_store_2d(&rank.hidden_64, staged + lane_index() * kStagingBox, column,
                        t.ring_row + warpgroup * kWarpgroupRows);
      }
      side.release(s.tiles, warpgroup);
    }
    side.advance();
  }

 private:
  template <bool kLimited>
  __device__ static __forceinline__ void stage_hidden(const Accumulators& acc, float limit, Shared& s, Math& math) {
    const uint32_t address = Staging::box_address(s.tiles);
    for_each_gate_and_up(acc, [&](int32_t i, const float* gate, const float* up) {
      float hidden[kFragment];
#pragma unroll
      for (int32_t j = 0; j < kFragment; ++j) hidden[j] = swiglu<kLimited>(gate[j], up[j], limit);
      Staging::write_box(address, i, hidden);
    });
    math.staging.release(s.tiles);
  }
};

// Of a macrobatch whose pre-activations the forward has not kept, rounded as if it had.
struct ReplayedGateUp : GateUpProduct<BackwardRank> {
  __device__ static __forceinline__ void epilogue(const Accumulators& acc, const Rank& rank, Shared& s,
                                                  const QueuedTask& t, Math& math) {
    store_pre_activations(acc, pre_activation_tile(rank.pre_activations, rank, t.ring_row, t.part));
    math.stage_nothing(s);
  }
  __device__ static __forceinline__ void store(const Rank&, Shared& s, const QueuedTask&, StoreSide& side) {
    store_nothing(s, side);
  }
};

}  // namespace mok::cuda::sm90
