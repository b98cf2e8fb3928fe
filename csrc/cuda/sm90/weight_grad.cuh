// weight_grad: a tile of one expert's gradient, summed over its rows in order.
#pragma once

#include "cuda/sm90/math.cuh"
#include "cuda/sm90/store.cuh"

namespace mok::cuda::sm90 {

// Of weight_grad. With fewer steps, to wait for each other costs what it saves.
inline constexpr int32_t kLeastSharedSteps = 16;
// At most so many tiles above each other are a run: while runs follow each other from left to right, their left operand
// stays in the cache.
inline constexpr int32_t kRunRows = 32;

// Which matrix's gradient a weight_grad task computes, and which tile of it. Those of wi_0 and wi_1 have the left
// operand in common, and count as one matrix of twice as many columns.
struct WeightTile {
  int32_t matrix;  // 0: wi_0, 1: wi_1, 2: wo
  int32_t row, column;
  int32_t index, high;  // of `high` tiles above each other, neighbours in the list, this is number `index`

  __device__ __forceinline__ WeightTile(const Shape& s, int32_t part) {
    const int32_t wi_across = static_cast<int32_t>(ceil_div(s.intermediate_size, kTileColumns));
    const int32_t wi_down = static_cast<int32_t>(ceil_div(s.hidden_size, kRowBlock)),
                  wi_tiles = 2 * wi_across * wi_down;
    const bool wo = part >= wi_tiles;
    const int32_t tile = wo ? part - wi_tiles : part;
    const int32_t across = wo ? static_cast<int32_t>(ceil_div(s.hidden_size, kTileColumns)) : 2 * wi_across;
    const int32_t down = wo ? static_cast<int32_t>(ceil_div(s.intermediate_size, kRowBlock)) : wi_down;
    const int32_t first = tile / (kRunRows * across) * kRunRows, rest = tile % (kRunRows * across);
    high = smaller(kRunRows, down - first);
    index = rest % high;
    row = (first + index) * kBlockRows;
    const int32_t right = rest / high;
    matrix = wo ? 2 : right / wi_across;
    column = (wo ? right : right % wi_across) * kTileColumns;
  }
};

class WeightGrad {
 public:
  using Rank = BackwardRank;

  __device__ static __forceinline__ void look_up(const Plan& plan, QueuedTask& t) {
    // All rows of a piece but the padding of its last block beyond a whole step.
    const int64_t whole = int64_t{t.blocks - 1} * kBlockRows;
    t.steps = t.blocks > 0 ? steps_of(whole + plan.real_rows(t.expert, t.block + t.blocks - 1)) : 0;
    t.begun = plan.begins_earlier(t.macrobatch, t.expert);
    t.goes_on = plan.ends_later(t.macrobatch, t.expert);
  }

  // Among tiles above each other.
  __device__ static __forceinline__ PlaceInRun place_in_run(const Rank& rank, const QueuedTask& t) {
    if (t.steps < kLeastSharedSteps) return {0, 1};
    const WeightTile tile(rank.shape, t.part);
    return {tile.index, tile.high};
  }

  __device__ static __forceinline__ void load(const Rank& rank, Shared& s, const QueuedTask& t, Loader& loader) {
    const WeightTile tile(rank.shape, t.part);
    const bool saved = t.macrobatch == 0 && rank.saved_rows;
    const CUtensorMap* left = tile.matrix == 2 ? &rank.hidden_64 : saved ? &rank.saved_rows_64 : &rank.rows_64;
    const int32_t count = t.steps, ring_rows = static_cast<int32_t>(rank.shape.ring_rows);
    int32_t row = t.ring_row;
    for (int32_t step = 0; step < count; ++step, row += kStepDepth) {
      if (row == ring_rows) row = 0;
      loader.step(
          s.tiles,
          [&](uint8_t* to, uint64_t* full) {
            tensor_load_2d(to, left, tile.row, row, full);
            tensor_load_2d(to + kBoxBytes, left, tile.row + kBoxColumns, row, full);
          },
          [&](int32_t half, uint8_t* to, uint64_t* full, bool both) {
#pragma unroll
            for (int32_t i = 0; i < 2; ++i) {
              const int32_t column = tile.column + half * kHalfColumns + i * kBoxColumns;
              uint8_t* box = to + i * kBoxBytes;
              if (tile.matrix == 2) {
                load_2d(box, &rank.grads_64, column, row, full, both);
              } else {
                load_3d(box, &rank.gate_up_grads_64, column, tile.matrix, row, full, both);
              }
            }
          });
    }
  }

  // The sum that the product goes on with: of an expert that an earlier macrobatch has begun; of one without rows, all.
  // Returns what the epilogue needs, known by the end of the product: whether the gradient is f32.
  __device__ static __forceinline__ bool begin(Accumulators& acc, const Rank& rank, const QueuedTask& t,
                                               const Product& p) {
    if (p.begun) {
      load_fragments(acc, straddle_of(rank, t));
    } else if (p.steps == 0) {
      clear_fragments(acc);
    }
    return rank.grads_in_f32;
  }

  __device__ static __forceinline__ void epilogue(const Accumulators& acc, bool in_f32, const Rank& rank, Shared& s,
                                                  const QueuedTask& t, const Product& p, Math& math) {
    if (p.goes_on) {
      save_fragments(acc, straddle_of(rank, t));
      math.stage_nothing(s);
    } else if (in_f32) {
      stage_f32<0>(acc, s, math);
      stage_f32<kAccumulators / 2>(acc, s, math);
    } else {
      stage_bf16(acc, s, math);
    }
  }

  // Boxes of 64 rows, clipped at the matrix's edges; in f32 the tile comes in two halves.
  __device__ static __forceinline__ void store(const Rank& rank, Shared& s, const QueuedTask& t, StoreSide& side) {
    if (t.goes_on) return store_nothing(s, side);
    const WeightTile tile(rank.shape, t.part);
    const CUtensorMap* map = tile.matrix == 0   ? &rank.wi_0_grad_64
                             : tile.matrix == 1 ? &rank.wi_1_grad_64
                                                : &rank.wo_grad_64;
    const int32_t box_columns = rank.grads_in_f32 ? kBoxColumns / 2 : kBoxColumns;
    for (int32_t first = 0; first < kTileColumns; first += 4 * box_columns) {
      for (int32_t warpgroup = 0; warpgroup < 2; ++warpgroup) {
        const uint8_t* staged = side.acquire(s.tiles, warpgroup);
        if (lane_index() < 4) {
          const int32_t column = tile.column + first + lane_index() * box_columns;
          tensor_store_3d(map, staged + lane_index() * kStagingBox, column, tile.row + warpgroup * kWarpgroupRows,
                          t.expert);
        }
        side.release(s.tiles, warpgroup);
      }
      side.advance();
    }
  }

 private:
  // Where accumulators of an unfinished gradient wait.
  __device__ static __forceinline__ float* straddle_of(const Rank& rank, const Task& t) {
    return rank.straddle + int64_t{t.part} * kBlockRows * kTileColumns;
  }

  __device__ static __forceinline__ void stage_bf16(const Accumulators& acc, Shared& s, Math& math) {
    const uint32_t address = Staging::box_address(s.tiles);
    for_each_fragment(acc, [&](int32_t i, const float* values) { Staging::write_box(address, i, values); });
    math.staging.release(s.tiles);
  }
  // Half of the tile's columns in f32 fill the staging area.
  template <int32_t first>
  __device__ static __forceinline__ void stage_f32(const Accumulators& acc, Shared& s, Math& math) {
    math.staging.acquire(s.tiles);
    const uint32_t address = Staging::f32_box_address(s.tiles);
#pragma unroll
    for (int32_t i = 0; i < kAccumulators / 2; i += 4) Staging::write_f32_box(address, i / 4, acc + first + i);
    math.staging.release(s.tiles);
  }
};

}  // namespace mok::cuda::sm90
