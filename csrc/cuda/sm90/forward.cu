// The forward megakernel on Hopper: one persistent CTA per SM. In each, a producer warp claims compute tasks and feeds
// tiles to two math warpgroups; two store warps push what these have staged; a communication warp pulls rows. All of it
// is driven by the task program of csrc/moe; CTAs take their roles in the order in which they arrive.
#include "cuda/communicate.cuh"
#include "cuda/kernels.h"
#include "cuda/reduce.cuh"
#include "cuda/sm90/tile.cuh"

namespace mok::cuda::sm90 {
namespace {

constexpr int32_t kMathWarps = 8, kProducerWarp = 8, kFirstStoreWarp = 9, kCommunicationWarp = 11, kWarps = 12;
constexpr int32_t kThreads = kWarps * 32;
constexpr int32_t kQueue = 3;
constexpr TaskKind kStop = static_cast<TaskKind>(-1);

struct Shared {
  TileMemory tiles;  // first: stages need the strongest alignment
  PullBuffer pull;
  Schedule schedule;
  Task queue[kQueue];
  uint64_t queue_full[kQueue], queue_empty[kQueue];
  int32_t halves[kQueue];  // warpgroups whose part of the task is stored
  int32_t here, arrival, go_on, last;
};
static_assert(sizeof(Shared) + 1024 <= 232448);
static_assert(kWarps * sizeof(PullBuffer) <= sizeof(TileMemory));

// Position in a ring of barriers: slot, and the parity of the phase to wait for.
template <int32_t size>
struct Turn {
  int32_t slot = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void advance() {
    if (++slot == size) {
      slot = 0;
      parity ^= 1;
    }
  }
};

// ---- The producer: one lane.

// Claims the next compute task into its place in the queue, once whoever had that place has left it.
__device__ __forceinline__ void claim(const Rank& rank, Shared& s, Turn<kQueue> turn) {
  mbarrier_wait(&s.queue_empty[turn.slot], turn.parity ^ 1);
  const int64_t ticket = atomicAdd(reinterpret_cast<unsigned long long*>(&rank.header().compute_ticket), 1ull);
  if (ticket < s.schedule.compute.tasks) {
    s.queue[turn.slot] = forward_task(s.schedule.plan, s.schedule.compute, ticket);
  } else {
    s.queue[turn.slot].kind = kStop;
  }
}

__device__ __forceinline__ void load_step(const Rank& rank, Shared& s, const Task& t, int32_t step, Stages& stages) {
  uint8_t* stage = stages.acquire(s.tiles);
  uint64_t* full = stages.full(s.tiles);
  uint8_t* right = stage + kLeftBytes;
  const int32_t k = step * kTileDepth, row = s.schedule.plan.ring_block(t.block) * static_cast<int32_t>(kRowBlock);
  if (t.kind == TaskKind::gate_up) {
    tensor_load_2d(stage, &rank.rows_map, k, row, full);
    const int32_t column = t.part * kGateUpColumns;
    for (int32_t i = 0; i < 2; ++i) {
      tensor_load_3d(right + i * kBoxBytes, &rank.wi_0_map, column + i * kBoxColumns, k, t.expert, full);
      tensor_load_3d(right + (i + 2) * kBoxBytes, &rank.wi_1_map, column + i * kBoxColumns, k, t.expert, full);
    }
  } else {
    tensor_load_2d(stage, &rank.hidden_map, k, row, full);
    const int32_t column = t.part * kTileColumns;
    for (int32_t i = 0; i < 4; ++i) {
      tensor_load_3d(right + i * kBoxBytes, &rank.wo_map, column + i * kBoxColumns, k, t.expert, full);
    }
  }
  stages.advance();
}

__device__ __forceinline__ int32_t steps_of(const Rank& rank, const Task& t) {
  if (t.kind == TaskKind::reduce) return 0;
  const int64_t depth = t.kind == TaskKind::gate_up ? rank.shape.hidden : rank.shape.intermediate;
  return static_cast<int32_t>(ceil_div(depth, kTileDepth));
}

__device__ __forceinline__ void produce(const Rank& rank, Shared& s) {
  const CounterMap map(s.schedule.plan);
  const int32_t* counters = rank.in_workspace<int32_t>(WorkspaceLayout(rank.shape).counters);
  Stages stages;
  Turn<kQueue> turn;
  claim(rank, s, turn);
  while (true) {
    Task& task = s.queue[turn.slot];
    if (task.kind != kStop && !wait_for_task(rank, map, counters, task)) task.kind = kStop;
    mbarrier_arrive(&s.queue_full[turn.slot]);
    if (task.kind == kStop) return;
    Turn<kQueue> next = turn;
    next.advance();
    const int32_t steps = steps_of(rank, task);
    // The next task is found while the stages of this one are full, so that finding it costs nothing.
    for (int32_t step = 0; step < steps; ++step) {
      if (step == steps / 2) claim(rank, s, next);
      load_step(rank, s, task, step, stages);
    }
    if (steps == 0) claim(rank, s, next);
    turn = next;
  }
}

// ---- Math warpgroups.

__device__ __forceinline__ void stage_pre_activations(float (&acc)[kAccumulators], Staging& staging) {
  staging.acquire();
#pragma unroll
  for (int i = 0; i < kAccumulators; i += 8) staging.write(i / 8, acc[i], acc[i + 1], acc[i + 2], acc[i + 3], acc[i + 4], acc[i + 5], acc[i + 6], acc[i + 7]);
  staging.release();
}

__device__ __forceinline__ float swiglu(float gate, float up, float limit) {
  const float g = gate > limit ? limit : gate;
  const float u = up > limit ? limit : up < -limit ? -limit : up;
  return __fmul_rn(__fdividef(g, 1.f + __expf(-g)), u);
}

// Gate columns are in the first half of the accumulators, the same columns of up in the second.
__device__ __forceinline__ void stage_hidden(float (&acc)[kAccumulators], float limit, Staging& staging) {
  staging.acquire();
#pragma unroll
  for (int i = 0; i < kAccumulators / 2; i += 8) {
    float h[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) h[j] = swiglu(acc[i + j], acc[i + j + kAccumulators / 2], limit);
    staging.write(i / 8, h[0], h[1], h[2], h[3], h[4], h[5], h[6], h[7]);
  }
  staging.release();
}

__device__ __forceinline__ bool keeps_pre_activations(const Rank& rank, const Task& t) {
  return t.kind == TaskKind::gate_up && t.macrobatch == 0 && rank.pre_activations;
}

__device__ __forceinline__ void compute(const Rank& rank, Shared& s, int64_t call) {
  const DeviceArena arena(rank.shape);
  const int32_t warp = threadIdx.x / 32, group = warp / 4;
  Stages stages;
  Turn<kQueue> turn;
  Staging staging(s.tiles, group);
  float acc[kAccumulators];
  for (;; turn.advance()) {
    mbarrier_wait(&s.queue_full[turn.slot], turn.parity);
    const Task& task = s.queue[turn.slot];
    const TaskKind kind = task.kind;
    if (kind == kStop) return;
    if (kind == TaskKind::reduce) {
      reduce_tokens(rank, arena, call, task.block, warp, kMathWarps);
    } else {
      multiply(acc, s.tiles, group, steps_of(rank, task), stages);
      if (keeps_pre_activations(rank, task) || kind == TaskKind::down) stage_pre_activations(acc, staging);
      if (kind == TaskKind::gate_up) stage_hidden(acc, rank.activation_limit, staging);
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(&s.queue_empty[turn.slot]);
  }
}

// ---- Store warps: one a warpgroup, each lane two rows of its 64.

// Stores `columns` staged columns from `staged` on of every real row to address(row).
template <class Address>
__device__ __forceinline__ void store_rows(const uint8_t* staged, int32_t real_rows, int64_t columns,
                                           const Address& address) {
  for (int32_t i = threadIdx.x % 32; i < kGroupRows; i += 32) {
    if (i < real_rows) bulk_store(address(i), staged + i * kStagingPitch, static_cast<uint32_t>(columns) * 2);
  }
}

__device__ __forceinline__ void store_gate_up(const Rank& rank, const Task& t, int64_t row, int32_t real_rows,
                                              StoreSide& staging) {
  const int64_t inner = rank.shape.intermediate, column = t.part * kGateUpColumns;
  const int64_t columns = smaller<int64_t>(kGateUpColumns, inner - column);
  if (keeps_pre_activations(rank, t)) {
    const uint8_t* staged = staging.acquire();
    bf16* to = rank.pre_activations + row * 2 * inner + column;
    store_rows(staged, real_rows, columns, [&](int32_t i) { return to + i * 2 * inner; });
    store_rows(staged + kGateUpColumns * 2, real_rows, columns, [&](int32_t i) { return to + i * 2 * inner + inner; });
    staging.release();
  }
  const uint8_t* staged = staging.acquire();
  bf16* to = rank.hidden + row * inner + column;
  store_rows(staged, real_rows, columns, [&](int32_t i) { return to + i * inner; });
  staging.release();
}

// Each row goes straight to its slot at its source.
__device__ __forceinline__ void store_down(const Rank& rank, const DeviceArena& arena, const Task& t, int32_t first_row,
                                           int32_t real_rows, StoreSide& staging) {
  const int64_t h = rank.shape.hidden, column = t.part * kTileColumns;
  const RowSource* table = rank.row_table + t.block * kRowBlock + first_row;
  const uint8_t* staged = staging.acquire();
  store_rows(staged, real_rows, smaller<int64_t>(kTileColumns, h - column), [&](int32_t i) {
    const RowSource to = table[i];
    return rank.in_arena<bf16>(to.rank, arena.at(arena.layout.slots)) + to.slot * h + column;
  });
  staging.release();
}

__device__ __forceinline__ void store(const Rank& rank, Shared& s, int32_t group) {
  const DeviceArena arena(rank.shape);
  const Plan& plan = s.schedule.plan;
  int32_t* counters = rank.in_workspace<int32_t>(WorkspaceLayout(rank.shape).counters);
  StoreSide staging(s.tiles, group);
  Turn<kQueue> turn;
  for (;; turn.advance()) {
    mbarrier_wait(&s.queue_full[turn.slot], turn.parity);
    const Task& task = s.queue[turn.slot];
    if (task.kind == kStop) return;
    if (task.kind != TaskKind::reduce) {
      const int32_t first_row = group * kGroupRows, real_rows = plan.real_rows(task.block) - first_row;
      const int64_t row = plan.ring_block(task.block) * kRowBlock + first_row;
      if (task.kind == TaskKind::gate_up) {
        store_gate_up(rank, task, row, real_rows, staging);
      } else {
        store_down(rank, arena, task, first_row, real_rows, staging);
      }
      bulk_wait_all();
      fence_proxy_async();
      __syncwarp();
      // Whichever half is stored second signals for both.
      if (threadIdx.x % 32 == 0 && add_acq_rel_shared(&s.halves[turn.slot], 1) == 1) {
        s.halves[turn.slot] = 0;
        add_release_gpu(counters + task.signals[0], 1);
      }
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(&s.queue_empty[turn.slot]);
  }
}

// ---- The CTA.

__device__ __forceinline__ void run_compute_cta(const Rank& rank, Shared& s, int64_t call, bool communicates) {
  const int32_t warp = threadIdx.x / 32;
  if (warp < kMathWarps) {
    take_registers<kMathRegisters>();
    compute(rank, s, call);
    return;
  }
  give_registers<kServiceRegisters>();
  if (warp == kProducerWarp) {
    if (threadIdx.x % 32 == 0) produce(rank, s);
  } else if (warp != kCommunicationWarp) {
    store(rank, s, warp - kFirstStoreWarp);
  } else if (communicates) {
    communicate(rank, s.schedule.plan, s.schedule.communication, s.pull);
  }
}

// The first CTA of a rank to arrive communicates, the second computes, so that two are enough for all to finish.
__device__ __forceinline__ bool is_communication_cta(const Launch& launch, int32_t order) {
  return launch.communication_ctas > 0 && order != 1 && order - (order > 1) < launch.communication_ctas;
}

__device__ __forceinline__ void initialise(Shared& s) {
  for (int32_t i = 0; i < kQueue; ++i) {
    mbarrier_init(&s.queue_full[i], 1);
    mbarrier_init(&s.queue_empty[i], kMathWarps + 2);
    s.halves[i] = 0;
  }
  s.tiles.initialise();
  fence_mbarrier_init();
}

// The rank's last CTA ends its call; of a call that has failed, y is NaN.
__device__ __forceinline__ void depart(const Launch& launch, const Rank& rank, Shared& s, int64_t call) {
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    const int32_t ranks = launch.ranks_here, ctas = (static_cast<int32_t>(gridDim.x) - s.here + ranks - 1) / ranks;
    s.last = atomicAdd(&rank.header().departures, 1) == ctas - 1;
  }
  __syncthreads();
  if (!s.last) return;
  ArenaHeader& header = rank.arena_header(rank.shape.rank);
  if (failed(rank)) {
    uint4* y = reinterpret_cast<uint4*>(rank.y);
    for (int64_t i = threadIdx.x; i < rank.shape.tokens * rank.shape.hidden / 8; i += kThreads) {
      y[i] = uint4{0x7fff7fff, 0x7fff7fff, 0x7fff7fff, 0x7fff7fff};
    }
  }
  if (threadIdx.x == 0) {
    header.arrived_before += rank.header().valid_slots;
    header.call = call;
  }
}

__global__ void __launch_bounds__(kThreads, 1) forward(const __grid_constant__ Launch launch) {
  extern __shared__ uint8_t memory[];
  Shared& s = *reinterpret_cast<Shared*>((reinterpret_cast<uintptr_t>(memory) + 1023) / 1024 * 1024);
  // Every launched rank has at least one CTA's worth of arrivals: arrival a serves rank a mod ranks.
  if (threadIdx.x == 0) {
    s.arrival = atomicAdd(&launch.rank(0).header().arrivals, 1);
    s.here = s.arrival % launch.ranks_here;
    initialise(s);
  }
  __syncthreads();
  const Rank& rank = launch.rank(s.here);
  const int64_t call = rank.arena_header(rank.shape.rank).call + 1;
  if (!failed(rank)) {
    if (threadIdx.x == 0) s.schedule = *rank.in_workspace<Schedule>(WorkspaceLayout(rank.shape).schedule);
    __syncthreads();
    if (is_communication_cta(launch, s.arrival / launch.ranks_here)) {
      PullBuffer* buffers = reinterpret_cast<PullBuffer*>(&s.tiles);
      communicate(rank, s.schedule.plan, s.schedule.communication, buffers[threadIdx.x / 32]);
    } else {
      run_compute_cta(rank, s, call, launch.communication_ctas == 0);
    }
  }
  depart(launch, rank, s, call);
}

}  // namespace

const void* forward_kernel() { return reinterpret_cast<const void*>(forward); }
int64_t forward_shared_bytes() { return sizeof(Shared) + 1024; }
int32_t forward_threads() { return kThreads; }

TileCounts tile_counts(const Shape& s) {
  const auto tiles = [](int64_t n, int64_t width) { return static_cast<int32_t>(ceil_div(n, width)); };
  return {tiles(s.intermediate, kGateUpColumns), tiles(s.hidden, kTileColumns), 0, 0, 0};
}

}  // namespace mok::cuda::sm90
