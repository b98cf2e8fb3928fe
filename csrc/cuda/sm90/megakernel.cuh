// The skeleton of both megakernels on Hopper: one persistent CTA per SM, in pairs. In each, a scheduler warp gets
// compute tasks and waits for what they need; a producer warp loads their tiles for two math warpgroups; a store warp
// stores or pushes what these have staged; a communication warp pulls rows and reduces tokens, and so do math warps
// before their first and after their last task. CTAs take their roles in the order in which pairs arrive. What the
// tasks of a direction are is in forward.cu and backward.cu, as a Work:
//   using Rank                             its arguments
//   look_up(rank, plan, task)              fills in what a QueuedTask knows; of weight_grad, whatever its part
//   place_in_run(rank, task)               among neighbours with the same right operand and as many steps
//   load(rank, s, task, loader)            loads the stages; by one lane
//   compute(rank, s, task, product, math)  by all math warps; the product is the task's, in registers
//   store(rank, s, arena, task, side)      by the store warp
//   spoil(rank)                            makes results NaN, after a failure
#pragma once

#include "cuda/communicate.cuh"
#include "cuda/kernels.h"
#include "cuda/sm90/pair.cuh"

namespace mok::cuda::sm90 {

inline constexpr int32_t kSchedulerWarp = kMathWarps, kProducerWarp = 9, kStoreWarp = 10, kCommunicationWarp = 11;
inline constexpr int32_t kWarps = 12, kThreads = kWarps * 32;
inline constexpr int32_t kQueue = 4;  // tasks that are ready, under way, or being stored
inline constexpr TaskKind kStop = static_cast<TaskKind>(-1);
// Named barriers; 0 is the CTA's, and the first of these is one for each math warpgroup.
inline constexpr int32_t kGroupBarrier = 1, kPullBarrier = 3, kBeginBarrier = 4, kEndBarrier = 5;

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
    const uint4 held = load_shared(shared_address(static_cast<const Product*>(this)));
    return reinterpret_cast<const Product&>(held);
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

// ---- The scheduler: one lane. Tasks that it has got wait in order; only their loads wait for them.

template <class Work>
class Scheduler {
 public:
  using Rank = typename Work::Rank;

  __device__ __forceinline__ Scheduler(const Rank& rank, Shared& s, const Roles& roles)
      : rank_(rank),
        s_(s),
        map_(s.schedule.plan),
        counters_(rank.template in_workspace<int32_t>(WorkspaceLayout(rank.shape).counters)),
        roles_(roles) {}

  __device__ __forceinline__ void run() {
    for (Turn<kQueue> turn;; turn.advance()) {
      mbarrier_wait(&s_.queue_empty[turn.slot()], turn.parity() ^ 1);
      QueuedTask& task = s_.queue[turn.slot()];
      next(task);
      task.Product::kind = task.kind;
      mbarrier_arrive(&s_.queue_full[turn.slot()]);
      if (task.kind == kStop) return;
    }
  }

 private:
  // After a failure only what is shared, since the other CTA relies on its loads. Such a task has waited for nothing
  // and signals nothing; it has no rows, so nothing of it leaves the CTA but a weight gradient, finished or not:
  // results are made NaN later.
  __device__ __forceinline__ void next(QueuedTask& task) {
    do {
      const int64_t ticket = get_ticket();
      if (ticket >= s_.schedule.compute.tasks) {
        task.kind = kStop;
        return;
      }
      if (ticket < piece_end_) {
        task = *last_;
        task.part += static_cast<int32_t>(ticket - last_ticket_);
      } else {
        write(ticket, task);
        failed_ = failed_ || !wait_for_task(rank_, map_, counters_, task);
      }
      last_ = &task;
      last_ticket_ = ticket;
      share(task);
    } while (failed_ && !task.shared);
    if (failed_) task.real_rows = task.signal_count = 0;
    stage_ = (stage_ + task.left_out + task.steps + task.chunks) % kStages;
  }
  // To search the plan and to wait takes longer than a short product, so it is not done for a tile of the last task's
  // piece.
  __device__ __forceinline__ void write(int64_t ticket, QueuedTask& task) {
    const Plan& plan = s_.schedule.plan;
    if (!segment_.holds(ticket)) segment_ = s_.schedule.compute.segment_of(ticket);
    write_task(rank_, plan, segment_, ticket, task);
    task.ring_row = plan.ring_block(task.block) * kBlockRows;
    task.chunks = 0;
    Work::look_up(rank_, plan, task);
    piece_end_ = task.kind == TaskKind::weight_grad ? ticket - task.part + rank_.tiles.weight_grad : 0;
  }
  __device__ __forceinline__ int64_t get_ticket() {
    if (cluster_rank() != roles_.first) return s_.mailbox.receive(mail_);
    const int64_t ticket = add(rank_.header().compute_ticket, roles_.count);
    if (roles_.count > 1) s_.mailbox.send(mail_, ticket + 1);
    return ticket;
  }
  // Neighbours in a run share. Their stages must be the same ones: both begin at the first, and go on alike.
  __device__ __forceinline__ void share(QueuedTask& task) {
    const PlaceInRun at = Work::place_in_run(rank_, task);
    task.shared = roles_.count > 1 && (cluster_rank() == 0 ? at.index + 1 < at.size : at.index > 0);
    task.left_out = task.shared && !aligned_ ? (kStages - stage_) % kStages : 0;
    aligned_ = task.shared;
  }

  const Rank& rank_;
  Shared& s_;
  const CounterMap map_;
  const int32_t* counters_;
  const Roles roles_;
  Turn<Mailbox::kPlaces> mail_;
  Segment segment_{};  // of the last task that was written
  const QueuedTask* last_ = nullptr;
  int64_t last_ticket_ = 0, piece_end_ = 0;  // the last task's; before which all differ from it in their part only
  int32_t stage_ = 0;                        // at which the next task begins
  bool aligned_ = false;                     // in both CTAs it is the same
  bool failed_ = false;
};

// Calls work(task) for every task of the queue, by a whole warp.
template <class Step>
__device__ __forceinline__ void for_each_task(Shared& s, const Step& work) {
  for (Turn<kQueue> turn;; turn.advance()) {
    mbarrier_wait(&s.queue_full[turn.slot()], turn.parity());
    const QueuedTask& task = s.queue[turn.slot()];
    if (task.kind == kStop) return;
    work(task);
    __syncwarp();
    if (arrives()) mbarrier_arrive(&s.queue_empty[turn.slot()]);
  }
}

// ---- The producer: one lane.

template <class Work>
__device__ __forceinline__ void produce(const typename Work::Rank& rank, Shared& s) {
  Loader loader;
  for_each_task(s, [&](const QueuedTask& task) {
    if (lane_index() != 0) return;
    loader.begin(s.tiles, task.shared, task.left_out);
    Work::load(rank, s, task, loader);
  });
}

// ---- Math warpgroups.

// What a math thread keeps from task to task.
struct Math {
  Stages stages;
  Staging staging;
  Turn<kQueue> turn;
  bool knows_next = false;  // look_ahead has seen the next task
  Product next;

  __device__ __forceinline__ Product take(Shared& s) {
    if (!knows_next) {
      mbarrier_wait(&s.queue_full[turn.slot()], turn.parity());
      next = s.queue[turn.slot()].product();
    }
    knows_next = false;
    return next;
  }
  __device__ __forceinline__ void finish(Shared& s) {
    __syncwarp();
    if (arrives()) mbarrier_arrive(&s.queue_empty[turn.slot()]);
    turn.advance();
  }
  // While the last step of a product runs, a task waits for the staging area, which its epilogue then need not do; and
  // it sees what comes next, if that is known, so that nothing but the epilogue is between two products.
  __device__ __forceinline__ void look_ahead(Shared& s) {
    staging.acquire(s.tiles);
    Turn<kQueue> after = turn;
    after.advance();
    knows_next = mbarrier_test(&s.queue_full[after.slot()], after.parity());
    if (knows_next) next = s.queue[after.slot()].product();
  }
  // Accumulators live no longer than their task: registers that survived it would be copied around each product.
  template <Layout layout>
  __device__ __forceinline__ void multiply(Accumulators& acc, Shared& s, const Product& p, bool accumulate = false) {
    sm90::multiply<layout>(acc, accumulate, s.tiles, thread_index() / 128, p.steps, p.shared_steps(), stages,
                           [&] { look_ahead(s); });
  }
  // A warpgroup whose rows of a block are all padding lets the block's tiles pass, and leaves the tensor cores and the
  // power to the other one. Nobody reads what the rings then hold in these rows.
  __device__ __forceinline__ static bool has_rows(const Product& p) {
    return thread_index() / 128 * kGroupRows < p.real_rows;
  }
  __device__ __forceinline__ void pass_steps(Shared& s, int32_t steps, int32_t shared_steps) {
    for (int32_t step = 0; step < steps; ++step) {
      pass_stage(s, [&] { give_back(s.tiles, stages.slot(), step, shared_steps); });
    }
  }
  template <class Done>
  __device__ __forceinline__ void pass_stage(Shared& s, const Done& done) {
    stages.wait_full(s.tiles);
    __syncwarp();
    if (arrives()) done();
    stages.advance();
  }
  // Rows side by side, to be pushed.
  __device__ __forceinline__ void stage_rows(const Accumulators& acc, Shared& s) {
    const uint32_t address = Staging::row_address(s.tiles);
#pragma unroll
    for (int32_t i = 0; i < kAccumulators / 8; ++i) Staging::write_row(address, i, acc + 8 * i);
    staging.release(s.tiles);
  }
  // This thread's place in its warpgroup's staging area, for vectors of 16 bytes.
  __device__ __forceinline__ uint32_t park_address(Shared& s) {
    return shared_address(s.tiles.staging[thread_index() / 128]) + thread_index() % 128 * 16;
  }
  // Until all threads of this warpgroup are here.
  __device__ __forceinline__ void meet_warpgroup() { named_barrier(kGroupBarrier + thread_index() / 128, 128); }
  // Nothing is staged; the store warp learns that this warpgroup's own stores are issued, and signals.
  __device__ __forceinline__ void stage_nothing(Shared& s) {
    fence_proxy_async();
    staging.acquire(s.tiles);
    staging.release(s.tiles);
  }
};

template <class Work>
__device__ __forceinline__ void compute(const typename Work::Rank& rank, Shared& s) {
  Math math;
  while (true) {
    const Product product = math.take(s);
    if (product.kind == kStop) return;
    math.pass_steps(s, product.left_out, 0);
    Work::compute(rank, s, s.queue[math.turn.slot()], product, math);
    math.finish(s);
  }
}

// ---- The store warp.

// Each row of the tile goes straight to its slot at its source.
__device__ __forceinline__ void push_rows(const Rank& rank, const DeviceArena& arena, const QueuedTask& t, Shared& s,
                                          StoreSide& side) {
  const int64_t h = rank.shape.hidden, column = t.part * kTileColumns;
  const uint32_t bytes = static_cast<uint32_t>(2 * smaller<int64_t>(kTileColumns, h - column));
  for (int32_t group = 0; group < 2; ++group) {
    const uint8_t* staged = side.acquire(s.tiles, group);
    for (int32_t i = lane_index(); i < smaller(kGroupRows, t.real_rows - group * kGroupRows); i += 32) {
      const RowSource to = rank.row_table[t.block * kRowBlock + group * kGroupRows + i];
      bf16* slot = rank.in_arena<bf16>(to.rank, arena.at(arena.layout.slots)) + to.slot * h + column;
      bulk_store(slot, staged + i * kStagingPitch, bytes);
    }
    side.release(s.tiles, group);
  }
  side.advance();
}

// The math warps have stored by themselves.
__device__ __forceinline__ void store_nothing(Shared& s, StoreSide& side) {
  for (int32_t group = 0; group < 2; ++group) {
    side.acquire(s.tiles, group);
    side.release(s.tiles, group);
  }
  side.advance();
}

template <class Work>
__device__ __forceinline__ void store(const typename Work::Rank& rank, Shared& s) {
  const DeviceArena arena(rank.shape);
  int32_t* counters = rank.template in_workspace<int32_t>(WorkspaceLayout(rank.shape).counters);
  StoreSide side;
  for_each_task(s, [&](const QueuedTask& task) {
    side.skip(task.left_out);
    Work::store(rank, s, arena, task, side);
    bulk_wait_all();
    fence_proxy_async();
    __syncwarp();
    if (lane_index() == 0) signal(task, counters);
    side.skip(task.steps + task.chunks);
  });
}

// ---- The CTA.

// A call begins with nothing to compute: math warps pull the first rows, all warps of a CTA one task at a time.
template <class R>
__device__ __forceinline__ void pull_first(const R& rank, Shared& s) {
  static_assert(kPullRows % kMathWarps == 0);
  const int32_t warp = thread_index() / 32;
  const Schedule& schedule = s.schedule;
  const DeviceArena arena(rank.shape);
  int32_t* counters = rank.template in_workspace<int32_t>(WorkspaceLayout(rank.shape).counters);
  CommunicationBuffer *buffers = math_buffers(s), &common = buffers[0];
  Pieces pieces(buffers[warp].pieces);
  while (true) {
    if (thread_index() == 0) {
      const int64_t ticket = add(rank.header().first_pull_ticket, 1);
      common.go_on = ticket < schedule.first_pulls;
      if (common.go_on) write_task(rank, schedule.plan, schedule.communication.segments[0], ticket, common.task);
    }
    named_barrier(kPullBarrier, kMathWarps * 32);
    if (!common.go_on) break;
    run_pull(rank, schedule.plan, arena, common.task, pulled_rows(common.task, warp, kMathWarps), pieces);
    fence_proxy_async();  // the products load the rows through the asynchronous proxy
    named_barrier(kPullBarrier, kMathWarps * 32);
    if (thread_index() == 0) signal(common.task, counters);
  }
  fence_proxy_async_shared();  // operands come into the same memory
}

// Before a CTA's stages are used, its math warps pull first rows; when they are no longer used, the warps turn to what
// is left of the communication list. Those of a CTA that only communicates do at once.
template <class Work>
__device__ __forceinline__ void run_cta(const typename Work::Rank& rank, Shared& s, const Roles& roles) {
  constexpr int32_t kUsers = (kMathWarps + 1) * 32;  // of the stages: math warps, and the producer or the store warp
  const int32_t warp = thread_index() / 32, cta = cluster_rank();
  const bool computes = roles.computes(cta);
  if (warp < kMathWarps) {
    take_registers<kMathRegisters>();
    if (computes) {
      pull_first(rank, s);
      named_barrier(kBeginBarrier, kUsers);
      compute<Work>(rank, s);
      named_barrier(kEndBarrier, kUsers);
    }
    communicate(rank, s.schedule, s.call, math_buffers(s)[warp]);
    return;
  }
  give_registers<kServiceRegisters>();
  if (warp == kCommunicationWarp) {
    if (roles.communicates(cta)) communicate(rank, s.schedule, s.call, s.communication);
  } else if (!computes) {
    return;
  } else if (warp == kSchedulerWarp) {
    if (lane_index() == 0) Scheduler<Work>(rank, s, roles).run();
  } else if (warp == kProducerWarp) {
    named_barrier(kBeginBarrier, kUsers);
    produce<Work>(rank, s);
  } else {
    store<Work>(rank, s);
    named_barrier(kEndBarrier, kUsers);
  }
}

__device__ __forceinline__ void initialise(Shared& s) {
  for (int32_t i = 0; i < kQueue; ++i) {
    mbarrier_init(&s.queue_full[i], 1);
    mbarrier_init(&s.queue_empty[i], (kMathWarps + 2) * kArrivals);  // and producer and store warp
  }
  s.mailbox.initialise();
  s.tiles.initialise();
  fence_mbarrier_init();
}

template <class T>
__device__ void fill_nan(T* data, int64_t count) {
  for (int64_t i = thread_index(); i < count; i += kThreads) data[i] = T(kNaN);
}

// The rank's last CTA ends its call; float results of a call that has failed are NaN.
template <class Work>
__device__ __forceinline__ void depart(const Launch<typename Work::Rank>& launch, const typename Work::Rank& rank,
                                       Shared& s) {
  __threadfence();
  cluster_barrier();  // nobody needs this CTA's shared memory any more
  bool last = false;
  if (thread_index() == 0) {
    add(rank.header().cycles, clock64() - s.began);
    __threadfence();
    const int32_t ranks = launch.ranks_here, pairs = static_cast<int32_t>(gridDim.x) / kPair;
    last = atomicAdd(&rank.header().departures, 1) == (pairs - s.here + ranks - 1) / ranks * kPair - 1;
    __threadfence();
  }
  if (!__syncthreads_or(last)) return;
  if (failed(rank)) Work::spoil(rank);
  if (thread_index() == 0) {
    ArenaHeader& header = rank.arena_header(rank.shape.rank);
    for (int32_t group = 0; group < kColumnGroups; ++group) {  // peers come with more only when this call has ended
      header.arrived_before[group] = load_acquire_sys(&header.arrived[group]);
    }
    header.cycles += *reinterpret_cast<volatile int64_t*>(&rank.header().cycles);
    header.call = s.call;
  }
}

// Arrival a serves rank a mod ranks, so that every rank soon has its pairs, whichever are resident. The first CTA
// decides for both: a peer may fail at any time, and all threads must agree on whether the call goes on.
template <class Work>
__device__ __forceinline__ void arrive(const Launch<typename Work::Rank>& launch, Shared& s) {
  cluster_barrier();  // both are here
  if (thread_index() == 0 && cluster_rank() == 0) {
    const int32_t arrival = atomicAdd(&launch.rank(0).header().arrivals, 1), here = arrival % launch.ranks_here;
    const int32_t goes_on = !failed(launch.rank(here));
    for (int32_t cta = 0; cta < kPair; ++cta) {
      store_cluster(cluster_address(&s.arrival, cta), arrival);
      store_cluster(cluster_address(&s.here, cta), here);
      store_cluster(cluster_address(&s.goes_on, cta), goes_on);
    }
  }
  cluster_barrier();
}

template <class Work>
__device__ __forceinline__ void run(const Launch<typename Work::Rank>& launch) {
  extern __shared__ __align__(1024) uint8_t memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  if (thread_index() == 0) {
    s.began = clock64();
    initialise(s);
  }
  arrive<Work>(launch, s);
  const typename Work::Rank& rank = launch.rank(s.here);
  if (thread_index() == 0) {
    s.call = rank.arena_header(rank.shape.rank).call + 1;
    if (s.goes_on) s.schedule = *rank.template in_workspace<Schedule>(WorkspaceLayout(rank.shape).schedule);
  }
  __syncthreads();
  if (s.goes_on) run_cta<Work>(rank, s, roles_of(launch, s.arrival));
  depart<Work>(launch, rank, s);
}

}  // namespace mok::cuda::sm90
