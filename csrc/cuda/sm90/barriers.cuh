// All barriers of a CTA in one place: who arrives, how often in a phase, who waits, and what is handed over. A warp
// arrives by one lane once it has come together; the racecheck build counts every lane (kArrivals in tile.cuh).
//
// clang-format off
// mbarrier             arrivals in a phase                        waited for by         hands over
// queue_full[4]        1: scheduler                               math, producer, store a task
// queue_empty[4]       10: 8 math warps, producer, store warp     scheduler             its place
// stage_full[3]        1: producer; and the bytes it announces,   math                  a step's operands, or what an
//                      of a shared step some from the other CTA                         epilogue needs
// stage_empty[3]       8: math warps; of a stage that an epilogue producer              the stage
//                      filled, the store warp in their place
// other_free[3]        8, from the other CTA: its producer in a   producer              the other CTA's stage, to load
//                      shared product's first 3 steps, then its                         into it as well
//                      math warps
// chunk_full[3]        8: math warps                              store warp            results in a stage
// staging_full[2]      128: threads of the warpgroup              store warp            staged rows; or only that the
//                                                                                       warpgroup's stores are issued
// staging_empty[2]     1: store warp                              the warpgroup         the staging area
// mailbox.sent[2]      1: the first CTA's scheduler               the second CTA's      a ticket
// mailbox.received[2]  1: the second CTA's scheduler              the first CTA's       its place
// clang-format on
//
// Named barriers, with numbers of threads, are below. The CTA's own (0, __syncthreads) and the cluster's are used
// before and after the work only, when no warp has a role.
#pragma once

#include <cstdint>

namespace mok::cuda::sm90 {

// A math warpgroup's 128 threads, kWarpgroupBarrier + 0 or 1: all have read what hidden_grad parked in the staging
// area.
inline constexpr int32_t kWarpgroupBarrier = 1;
// All 256 math threads, around each of a call's first pulls: the task is there; its rows are.
inline constexpr int32_t kPullBarrier = 3;
// 288 threads: math warps and the producer, before which the stages hold first pulls; and math warps and the store
// warp, after which they hold what math warps communicate.
inline constexpr int32_t kBeginBarrier = 4, kEndBarrier = 5;

}  // namespace mok::cuda::sm90
