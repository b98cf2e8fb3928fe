// What the warps of a CTA share: its memory, and in it the queue in which tasks go from the scheduler to all others.
#pragma once

#include "cuda/communicate.cuh"
#include "cuda/sm90/barriers.cuh"
#include "cuda/sm90/fences.cuh"
#include "cuda/sm90/pair.cuh"

namespace mok::cuda::sm90 {

inline constexpr int32_t kSchedulerWarp = kMathWarps, kProducerWarp = 9, kStoreWarp = 10, kCommunicationWarp = 11;
inline constexpr int32_t kWarps = 12, kThreads = kWarps * 32;
inline constexpr int32_t kQueue = 4;  // tasks that are ready, under way, or being stored
inline constexpr TaskKind kStop = static_cast<TaskKind>(-1);

// Which of how many neighbouring tasks that multiply with the same right operand.
struct PlaceInRun {
  int32_t index, size;
};

// A task's product. Math warps begin it with what they get in one load.
struct alignas(16) Product {
  int32_t steps;        // a stage each
  int32_t ring_row;     // of its (first) block
  int16_t real_rows;    // of its block; not of a piece (weight_grad); 0 after a failure
  int8_t left_out;      // stages before it
  int8_t chunks;        // stages after it, for its epilogue
  TaskKind kind;        // the task's
  bool shared;          // the right operand, with the pair's other CTA
  bool begun, goes_on;  // weight_grad: an earlier macrobatch has begun the expert; a later one has more of it

  __device__ __forceinline__ int32_t shared_steps() const { return shared ? steps : 0; }
};
static_assert(sizeof(Product) == 16);

// A task with all that its CTA's warps need to know of the plan, so that none of them stops to look.
struct QueuedTask : Task, Product {
  using Task::kind;

  __device__ __forceinline__ Product product() const {
    return __builtin_bit_cast(Product, load_shared(shared_address(static_cast<const Product*>(this))));
  }
};

struct Shared {
  TileMemory tiles;  // first: stages need the strongest alignment
  CommunicationBuffer communication;
  Schedule schedule;
  QueuedTask queue[kQueue];
  uint64_t queue_full[kQueue], queue_empty[kQueue];
  Mailbox mailbox;
  int64_t call;   // this one's number
  int64_t began;  // cycle
  // Alike in both CTAs: the pair's arrival, the rank it serves, and whether the call goes on.
  int32_t arrival, here, goes_on;
};
static_assert(sizeof(Shared) <= 232448);
static_assert(kMathWarps * sizeof(CommunicationBuffer) <= sizeof(TileMemory::stages));

// Of the math warps, when they do not compute: in the place of the stages.
__device__ __forceinline__ CommunicationBuffer* math_buffers(Shared& s) {
  return reinterpret_cast<CommunicationBuffer*>(s.tiles.stages);
}

// By a whole warp, which no longer needs the task.
__device__ __forceinline__ void give_back_task(Shared& s, int32_t place) {
  __syncwarp();
  if (arrives()) mbarrier_arrive(&s.queue_empty[place]);
}

// Calls work(task) for every task of the queue, by a whole warp.
template <class Step>
__device__ __forceinline__ void for_each_task(Shared& s, const Step& work) {
  for (Turn<kQueue> turn;; turn.advance()) {
    mbarrier_wait(&s.queue_full[turn.place()], turn.parity());
    const QueuedTask& task = s.queue[turn.place()];
    if (task.kind == kStop) return;
    work(task);
    give_back_task(s, turn.place());
  }
}

}  // namespace mok::cuda::sm90
