// The matrix product of one tile on Hopper: 128 rows x 256 columns, a ring of stages between the producer and two math
// warpgroups of 64 rows each, and a staging area a warpgroup between these and the store warp.
//
// A step of a product is 64 deep and takes a stage: the copy engine is limited by instructions (about 100 cycles each)
// and by requests (128 bytes at most), so boxes are as large as a pair's halves of an operand allow (pair.cuh).
// Epilogues use stages as well.
#pragma once

#include "cuda/sm90/arguments.h"
#include "cuda/sm90/wgmma.cuh"

namespace mok::cuda::sm90 {

inline constexpr int32_t kBlockRows = static_cast<int32_t>(kRowBlock), kWarpgroupRows = kBlockRows / 2;
inline constexpr int32_t kGateUpColumns = kTileColumns / 2;
inline constexpr int32_t kAccumulators = 128;  // a thread: 64 x 256 over 128 threads
using Accumulators = float[kAccumulators];
inline constexpr int32_t kStepDepth = 64;
inline constexpr int32_t kWarpgroupBytes = kWarpgroupRows * kStepDepth * 2;  // a warpgroup's part of the left operand
inline constexpr int32_t kRight = 2 * kWarpgroupBytes;                       // where in a step the right operand begins
inline constexpr int32_t kStageBytes = kRight + kTileColumns * kStepDepth * 2;
inline constexpr int32_t kStages = 3;
inline constexpr int32_t kBoxColumns = 64;  // of a transposed operand: 128 bytes
inline constexpr int32_t kBoxBytes = kStepDepth * kBoxColumns * 2;
inline constexpr int32_t kStagingPitch = kTileColumns * 2 + 16;  // bytes; 16 more, so that stmatrix has no conflicts
inline constexpr int32_t kStagingBox = kWarpgroupRows * 128;     // bytes: 64 rows of 128, in the 128-byte swizzle
inline constexpr int32_t kMathRegisters = 208, kServiceRegisters = 88;
// Warpgroups take only what others have given, else they wait for ever: a launch of 384 threads has 168 for each.
static_assert(2 * kMathRegisters + kServiceRegisters <= 3 * 168);

// Which dimension of the operands is contiguous: K, or (transposed) the other one.
enum class Layout { activations_weights, activations_weights_k, both_transposed };  // K-major left, unless both

__device__ __forceinline__ int32_t steps_of(int64_t depth) { return static_cast<int32_t>(ceil_div(depth, kStepDepth)); }

// One lane arrives at a barrier for its warp, once that has come together. compute-sanitizer's racecheck does not count
// the others as ordered by that: for it, every lane arrives.
#ifdef MOK_EVERY_LANE_ARRIVES
inline constexpr int32_t kArrivals = 32;
#else
inline constexpr int32_t kArrivals = 1;
#endif
inline constexpr int32_t kMathWarps = 8, kMathArrivals = kMathWarps * kArrivals;
__device__ __forceinline__ bool arrives() { return kArrivals == 32 || lane_index() == 0; }

struct TileMemory {
  alignas(1024) uint8_t stages[kStages][kStageBytes];
  alignas(1024) uint8_t staging[2][kWarpgroupRows * kStagingPitch];
  uint64_t stage_full[kStages], stage_empty[kStages];
  uint64_t staging_full[2], staging_empty[2];
  uint64_t other_free[kStages];  // the stage of the pair's other CTA, for a shared step: by its math warps
  uint64_t chunk_full[kStages];  // what an epilogue has left in the stage is ready to be stored

  __device__ void initialise() {
    for (int32_t i = 0; i < kStages; ++i) {
      mbarrier_init(&stage_full[i], 1);
      mbarrier_init(&stage_empty[i], kMathArrivals);
      mbarrier_init(&other_free[i], kMathArrivals);
      mbarrier_init(&chunk_full[i], kMathArrivals);
    }
    for (int32_t i = 0; i < 2; ++i) {
      mbarrier_init(&staging_full[i], 128);
      mbarrier_init(&staging_empty[i], kArrivals);
    }
  }
};

// Position in a ring of barriers: place, and the parity of the phase to wait for. Packed, since registers are scarce.
template <int32_t size>
class Turn {
 public:
  __device__ __forceinline__ int32_t place() const { return state_ >> 1; }
  __device__ __forceinline__ uint32_t parity() const { return state_ & 1; }
  __device__ __forceinline__ void advance() { state_ = state_ >> 1 == size - 1 ? (state_ & 1) ^ 1 : state_ + 2; }

 private:
  int32_t state_ = 0;
};

// A side's position in the ring of stages.
class Stages {
 public:
  // Producer: waits until the next stage is free, and announces the bytes that come into it. Those from the pair's
  // other CTA may have come before; the phase does not end without this arrival.
  __device__ __forceinline__ uint8_t* acquire(TileMemory& m, uint32_t bytes) {
    const int32_t place = turn_.place();
    mbarrier_wait(&m.stage_empty[place], turn_.parity() ^ 1);
    mbarrier_arrive_expect(&m.stage_full[place], bytes);
    return m.stages[place];
  }
  __device__ __forceinline__ uint64_t* full(TileMemory& m) { return &m.stage_full[turn_.place()]; }
  // Math: waits until the stage is loaded.
  __device__ __forceinline__ uint32_t wait_full(TileMemory& m) {
    mbarrier_wait(&m.stage_full[turn_.place()], turn_.parity());
    return shared_address(m.stages[turn_.place()]);
  }
  // Math: what an epilogue has left in the stage is to be stored, which gives the stage back.
  __device__ __forceinline__ uint64_t* chunk_full(TileMemory& m) { return &m.chunk_full[turn_.place()]; }
  __device__ __forceinline__ int32_t place() const { return turn_.place(); }
  __device__ __forceinline__ void advance() { turn_.advance(); }

 private:
  Turn<kStages> turn_;
};

// One step: acc [64, 256] += left[warpgroup] [64, 64] @ right [64, 256]; unless `accumulate`, the sum begins anew.
template <Layout layout>
__device__ __forceinline__ void multiply_step(Accumulators& acc, uint32_t stage, int32_t warpgroup, bool accumulate) {
  constexpr bool kLeftTransposed = layout == Layout::both_transposed;
  constexpr bool kRightTransposed = layout != Layout::activations_weights_k;
  const uint32_t left_address = stage + warpgroup * kWarpgroupBytes, right_address = stage + kRight;
  const uint64_t left = kLeftTransposed ? mn_major(left_address) : k_major(left_address);
  const uint64_t right = kRightTransposed ? mn_major(right_address) : k_major(right_address);
  wgmma_fence();
#pragma unroll
  for (int32_t k = 0; k < kStepDepth / 16; ++k) {
    wgmma_64x256x16<kLeftTransposed, kRightTransposed>(acc, left + k * (kLeftTransposed ? kMnMajorStep : kKMajorStep),
                                                       right + k * (kRightTransposed ? kMnMajorStep : kKMajorStep),
                                                       accumulate || k > 0);
  }
  wgmma_commit();
}

// By one lane of each math warp: step `step` of a product is done with its stage. Of a product whose steps the pair
// shares (else shared_steps is 0), the other CTA hears as well, if the stage is to take a later one of them.
__device__ __forceinline__ void give_back(TileMemory& m, int32_t place, int32_t step, int32_t shared_steps) {
  mbarrier_arrive(&m.stage_empty[place]);
  if (step + kStages < shared_steps) mbarrier_arrive_cluster(cluster_address(&m.other_free[place], cluster_rank() ^ 1));
}

// acc = (accumulate ? acc : 0) + the product over `steps` steps. A step's stage is given back when the next one's
// products are under way; meanwhile() runs beside the last one's.
template <Layout layout, class Meanwhile>
__device__ __forceinline__ void multiply(Accumulators& acc, bool accumulate, TileMemory& m, int32_t warpgroup,
                                         int32_t steps, int32_t shared_steps, Stages& stages,
                                         const Meanwhile& meanwhile) {
  const bool elected = arrives();
  multiply_step<layout>(acc, stages.wait_full(m), warpgroup, accumulate);
  int32_t previous = stages.place();
  stages.advance();
  for (int32_t step = 1; step < steps; ++step) {
    multiply_step<layout>(acc, stages.wait_full(m), warpgroup, true);
    wgmma_wait<1>();
    if (elected) give_back(m, previous, step - 1, shared_steps);
    previous = stages.place();
    stages.advance();
  }
  meanwhile();
  wgmma_wait<0>();
  if (elected) mbarrier_arrive(&m.stage_empty[previous]);
}

// A warpgroup's side of its staging area: 64 rows of up to 256 bf16 (or 128 f32), in one of two layouts, or
// whatever an epilogue keeps there for itself (hidden_grad.cuh). Keeps nothing but the phase's parity.
class Staging {
 public:
  __device__ __forceinline__ void acquire(TileMemory& m) { mbarrier_wait(&m.staging_empty[warpgroup()], parity_ ^ 1); }
  // Rows side by side, for stores row by row. Where this thread writes is found once for all columns.
  __device__ __forceinline__ static uint32_t row_address(TileMemory& m) {
    return shared_address(m.staging[warpgroup()]) + matrix_row() * kStagingPitch + lane_index() / 16 * 16;
  }
  // 16 columns, from 16 * i on, of 8 accumulators.
  __device__ __forceinline__ static void write_row(uint32_t address, int32_t i, const float* a) {
    write_matrices(address + i * 32, a);
  }

  // Boxes of 64 columns of bf16 (or 32 of f32) in the 128-byte swizzle, for tensor stores: the 16-byte piece p of a row
  // is at p xor (row mod 8).
  __device__ __forceinline__ static uint32_t box_address(TileMemory& m) {
    return shared_address(m.staging[warpgroup()]) + matrix_row() * 128;
  }
  __device__ __forceinline__ static void write_box(uint32_t address, int32_t i, const float* a) {
    const int32_t lane = lane_index(), piece = (i % 4 * 2 + lane / 16) ^ (lane % 8);
    write_matrices(address + i / 4 * kStagingBox + piece * 16, a);
  }
  __device__ __forceinline__ static uint32_t f32_box_address(TileMemory& m) {
    return shared_address(m.staging[warpgroup()]) + (warp() * 16 + lane_index() / 4) * 128;
  }
  // 8 columns, from 8 * i on, of 4 accumulators, unrounded.
  __device__ __forceinline__ static void write_f32_box(uint32_t address, int32_t i, const float* a) {
    const int32_t lane = lane_index(), piece = (i % 4 * 2 + lane % 4 / 2) ^ (lane / 4);
    const uint32_t to = address + i / 4 * kStagingBox + piece * 16 + lane % 2 * 8;
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(a[0]), "f"(a[1]) : "memory");
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to + 8 * 128), "f"(a[2]), "f"(a[3]) : "memory");
  }
  __device__ __forceinline__ void release(TileMemory& m) {
    fence_proxy_async_shared();
    mbarrier_arrive(&m.staging_full[warpgroup()]);
    parity_ ^= 1;
  }

 private:
  __device__ __forceinline__ static int32_t warpgroup() { return thread_index() / 128; }
  __device__ __forceinline__ static int32_t warp() { return thread_index() / 32 % 4; }
  // stmatrix: lane l names the row at which matrix l / 8 has its row l % 8; matrices 1 and 3 are 8 rows down.
  __device__ __forceinline__ static int32_t matrix_row() {
    const int32_t lane = lane_index();
    return warp() * 16 + lane / 8 % 2 * 8 + lane % 8;
  }
  __device__ __forceinline__ static void write_matrices(uint32_t address, const float* a) {
    store_matrices(address, pack_bf16(a[0], a[1]), pack_bf16(a[2], a[3]), pack_bf16(a[4], a[5]), pack_bf16(a[6], a[7]));
  }

  uint32_t parity_ = 0;
};

// The store warp's side: the staging areas of both warpgroups, filled and emptied alike.
class StoreSide {
 public:
  __device__ __forceinline__ const uint8_t* acquire(TileMemory& m, int32_t warpgroup) {
    mbarrier_wait(&m.staging_full[warpgroup], parity_);
    return m.staging[warpgroup];
  }
  // After this warp's bulk stores from the area have been issued.
  __device__ __forceinline__ void release(TileMemory& m, int32_t warpgroup) {
    bulk_commit();
    bulk_wait_read<0>();
    __syncwarp();
    if (arrives()) mbarrier_arrive(&m.staging_empty[warpgroup]);
  }
  __device__ __forceinline__ void advance() { parity_ ^= 1; }

  // Stages pass by the store warp, which sees only those that an epilogue leaves to it: stage n of the current task.
  // skip(n) leaves a task's n stages behind.
  __device__ __forceinline__ int32_t wait_chunk(TileMemory& m, int32_t n) {
    const int32_t place = (stage_ + n) % kStages;
    mbarrier_wait(&m.chunk_full[place], chunk_parities_ >> place & 1);
    chunk_parities_ ^= 1u << place;
    return place;
  }
  __device__ __forceinline__ void skip(int32_t n) { stage_ = (stage_ + n) % kStages; }

 private:
  uint32_t parity_ = 0, chunk_parities_ = 0;
  int32_t stage_ = 0;
};

}  // namespace mok::cuda::sm90
