// CTAs come in pairs, clusters of two, and tasks by twos: the first CTA claims two neighbours, one for each. Where both
// multiply with the same right operand, each CTA loads half of it, into the stages of both: a third fewer bytes leave
// the cache, and a chip that is limited by its power runs faster. Otherwise the two know nothing of each other.
#pragma once

#include "cuda/sm90/tile.cuh"

namespace mok::cuda::sm90 {

inline constexpr int32_t kHalfColumns = kTileColumns / 2, kHalfBytes = kHalfColumns * kStepDepth * 2;

// What a pair does. A CTA that computes and communicates has warps for each.
struct Roles {
  int32_t first, count;  // CTAs [first, first + count) compute
  bool all_communicate;  // or only those that do not compute

  __device__ __forceinline__ bool computes(int32_t cta) const { return cta >= first && cta < first + count; }
  __device__ __forceinline__ bool communicates(int32_t cta) const { return all_communicate || !computes(cta); }
};

// The first CTA of a rank communicates, the second computes, so that a pair is enough for all to finish.
template <class R>
__device__ __forceinline__ bool is_communication_cta(const Launch<R>& launch, int32_t order) {
  return launch.communication_ctas > 0 && order != 1 && order - (order > 1) < launch.communication_ctas;
}
template <class R>
__device__ __forceinline__ Roles roles_of(const Launch<R>& launch, int32_t arrival) {
  const int32_t order = arrival / launch.ranks_here * kPair;
  Roles roles{0, 0, launch.communication_ctas == 0};
  for (int32_t cta = 0; cta < kPair; ++cta) roles.count += !is_communication_cta(launch, order + cta);
  roles.first = is_communication_cta(launch, order);
  return roles;
}

// Where a pair's second CTA gets its tickets from the first one.
struct Mailbox {
  static constexpr int32_t kPlaces = 2;  // few: what the first CTA has claimed for the second one, nobody else can have
  int64_t tickets[kPlaces];
  uint64_t sent[kPlaces], received[kPlaces];  // the receiver's; the sender's

  __device__ void initialise() {
    for (int32_t i = 0; i < kPlaces; ++i) {
      mbarrier_init(&sent[i], 1);
      mbarrier_init(&received[i], 1);
    }
  }
  __device__ __forceinline__ void send(Turn<kPlaces>& turn, int64_t ticket) {
    const int32_t place = turn.place();
    mbarrier_acquire_cluster(&received[place], turn.parity() ^ 1);
    store_cluster(cluster_address(&tickets[place], 1), ticket);
    mbarrier_release_cluster(cluster_address(&sent[place], 1));
    turn.advance();
  }
  __device__ __forceinline__ int64_t receive(Turn<kPlaces>& turn) {
    const int32_t place = turn.place();
    mbarrier_acquire_cluster(&sent[place], turn.parity());
    const int64_t ticket = *static_cast<volatile int64_t*>(&tickets[place]);
    mbarrier_release_cluster(cluster_address(&received[place], 0));
    turn.advance();
    return ticket;
  }
};

// How a producer fills the stages of a product.
class Loader {
 public:
  // The next task: whether the right operand is shared, and how many stages this CTA leaves out before it, so that both
  // load into the same ones.
  __device__ __forceinline__ void begin(TileMemory& m, bool shared, int32_t left_out) {
    shared_ = shared;
    step_ = 0;
    for (int32_t i = 0; i < left_out; ++i) {
      stages_.acquire(m, 0);
      stages_.advance();
    }
  }
  // One step: load_left(to, full), and load_right(half, to, full, both) for each half of the right operand's columns
  // that this CTA loads, if `both` into both CTAs.
  template <class LoadLeft, class LoadRight>
  __device__ __forceinline__ void step(TileMemory& m, const LoadLeft& load_left, const LoadRight& load_right) {
    uint8_t* stage = stages_.acquire(m, kStageBytes);
    uint64_t* full = stages_.full(m);
    if (shared_) {
      const int32_t place = stages_.place(), own = cluster_rank();
      // Before a product's first steps a stage may have held anything, and only this producer knows that it is free.
      // Then it is free when the math warps are done with the product's step before in it, and they tell (give_back).
      if (step_++ < kStages) mbarrier_arrive_cluster(cluster_address(&m.other_free[place], own ^ 1), kMathArrivals);
      load_left(stage, full);
      mbarrier_wait(&m.other_free[place], parities_ >> place & 1);
      parities_ ^= 1u << place;
      load_right(own, stage + kRight + own * kHalfBytes, full, true);
    } else {
      load_left(stage, full);
      load_right(0, stage + kRight, full, false);
      load_right(1, stage + kRight + kHalfBytes, full, false);
    }
    stages_.advance();
  }
  // One contiguous piece for an epilogue.
  __device__ __forceinline__ void chunk(TileMemory& m, const void* from, uint32_t bytes) {
    uint8_t* stage = stages_.acquire(m, bytes);
    bulk_load(stage, from, bytes, stages_.full(m));
    stages_.advance();
  }

 private:
  Stages stages_;
  bool shared_ = false;
  int32_t step_ = 0;       // of a shared product
  uint32_t parities_ = 0;  // of other_free, a bit a stage
};

__device__ __forceinline__ void load_2d(void* to, const CUtensorMap* map, int32_t x, int32_t y, uint64_t* full,
                                        bool both) {
  both ? tensor_load_both_2d(to, map, x, y, full) : tensor_load_2d(to, map, x, y, full);
}
__device__ __forceinline__ void load_3d(void* to, const CUtensorMap* map, int32_t x, int32_t y, int32_t z,
                                        uint64_t* full, bool both) {
  both ? tensor_load_both_3d(to, map, x, y, z, full) : tensor_load_3d(to, map, x, y, z, full);
}

// One step of a product whose right operand is an expert's [columns, K] with K contiguous.
template <class LoadLeft>
__device__ __forceinline__ void load_step_k_major(TileMemory& m, Loader& loader, const CUtensorMap* right, int32_t k,
                                                  int32_t column, int32_t expert, const LoadLeft& load_left) {
  loader.step(m, load_left, [&](int32_t half, uint8_t* to, uint64_t* full, bool both) {
    load_3d(to, right, k, column + half * kHalfColumns, expert, full, both);
  });
}

}  // namespace mok::cuda::sm90
