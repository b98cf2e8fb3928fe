// What the store warp does for more than one kind of task; its tensor stores are beside the products.
#pragma once

#include "cuda/sm90/queue.cuh"

namespace mok::cuda::sm90 {

// Each row of the tile goes straight to its slot at its source.
__device__ __forceinline__ void push_rows(const Rank& rank, const DeviceRows& arena, const QueuedTask& t, Shared& s,
                                          StoreSide& side) {
  const int64_t h = rank.shape.hidden_size, column = t.part * kTileColumns;
  const uint32_t bytes = static_cast<uint32_t>(2 * smaller<int64_t>(kTileColumns, h - column));
  for (int32_t warpgroup = 0; warpgroup < 2; ++warpgroup) {
    const uint8_t* staged = side.acquire(s.tiles, warpgroup);
    for (int32_t i = lane_index(); i < smaller(kWarpgroupRows, t.real_rows - warpgroup * kWarpgroupRows); i += 32) {
      const RowSource to = rank.row_table[t.block * kRowBlock + warpgroup * kWarpgroupRows + i];
      bf16* slot = rank.in_arena<bf16>(to.rank, arena.slots) + to.slot * h + column;
      bulk_store(slot, staged + i * kStagingPitch, bytes);
    }
    side.release(s.tiles, warpgroup);
  }
  side.advance();
}

// The math warps have stored by themselves.
__device__ __forceinline__ void store_nothing(Shared& s, StoreSide& side) {
  for (int32_t warpgroup = 0; warpgroup < 2; ++warpgroup) {
    side.acquire(s.tiles, warpgroup);
    side.release(s.tiles, warpgroup);
  }
  side.advance();
}

}  // namespace mok::cuda::sm90
