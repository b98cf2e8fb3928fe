// down: hidden @ wo. The rows of a tile go straight to their slots, at whatever rank they came from.
#pragma once

#include "cuda/sm90/math.cuh"
#include "cuda/sm90/store.cuh"

namespace mok::cuda::sm90 {

struct Down {
  using Rank = ForwardRank;

  __device__ static __forceinline__ int64_t depth(const Shape& s) { return s.intermediate_size; }

  __device__ static __forceinline__ void load(const Rank& rank, Shared& s, const QueuedTask& t, Loader& loader) {
    const int32_t count = t.steps, row = t.ring_row, column = t.part * kTileColumns, expert = t.expert;
    for (int32_t step = 0; step < count; ++step) {
      const int32_t k = step * kStepDepth;
      loader.step(
          s.tiles, [&](uint8_t* to, uint64_t* full) { tensor_load_2d(to, &rank.hidden_128, k, row, full); },
          [&](int32_t half, uint8_t* to, uint64_t* full, bool both) {
            const int32_t first = column + half * kHalfColumns;
            load_3d(to, &rank.wo_64, first, k, expert, full, both);
            load_3d(to + kBoxBytes, &rank.wo_64, first + kBoxColumns, k, expert, full, both);
          });
    }
  }

  __device__ static __forceinline__ void epilogue(const Accumulators& acc, Shared& s, Math& math) {
    math.stage_rows(acc, s);
  }

  __device__ static __forceinline__ void store(const Rank& rank, Shared& s, const DeviceRows& arena,
                                               const QueuedTask& t, StoreSide& side) {
    push_rows(rank, arena, t, s, side);
  }
};

}  // namespace mok::cuda::sm90
