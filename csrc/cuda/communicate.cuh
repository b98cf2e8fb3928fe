// Communication tasks, each run by one warp: pull rows from their source ranks into the ring, tell source ranks how
// many of their rows have come back, and reduce those that the rank itself got back. The same code in communication
// warps and in communication CTAs, for one GPU and for many. The first pulls are shared by the math warps of a CTA.
#pragma once

#include "cuda/progress.cuh"
#include "cuda/reduce.cuh"
#include "moe/lists.h"

namespace mok::cuda {

// Shared memory of one warp that communicates.
struct CommunicationBuffer {
  CopyRing::Memory copies;
  Task task;
  SlotBlock block;
  int32_t go_on;
};

// Goes through up to 32 rows copy by copy.
struct RowCursor {
  int32_t row = 0, offset = 0;  // in the row, bytes, of this lane's first vector
  int32_t row_bytes;

  __device__ __forceinline__ explicit RowCursor(int32_t row_bytes) : offset(lane_index() * 16), row_bytes(row_bytes) {}
  __device__ __forceinline__ int32_t left() const { return row_bytes - offset; }
  __device__ __forceinline__ void advance() {
    offset += CopyRing::kBytes;
    if (offset - offset % CopyRing::kBytes < row_bytes) return;  // alike in all lanes
    offset %= CopyRing::kBytes;
    ++row;
  }
};

// Copies `rows` rows of row_bytes; source(row) is the address at the source, called by every lane.
template <class Source>
__device__ __forceinline__ void copy_rows(int32_t rows, int32_t row_bytes, uint8_t* to, const Source& source,
                                          CopyRing& copies) {
  const uint64_t address = lane_index() < rows ? reinterpret_cast<uint64_t>(source(lane_index())) : 0;
  RowCursor next(row_bytes);
  const auto load = [&] {
    const uint64_t from = __shfl_sync(0xffffffff, address, next.row % 32) + next.offset;
    copies.load(reinterpret_cast<const uint8_t*>(from), next.row < rows ? next.left() : 0);
    next.advance();
  };
  for (int32_t i = 0; i < CopyRing::kCount; ++i) load();
  for (RowCursor at(row_bytes); at.row < rows; at.advance()) {
    const uint32_t copy = copies.wait();
    uint8_t* place = to + int64_t{at.row} * row_bytes + at.offset;
    uint4 held[CopyRing::kVectors];  // all at once, since shared memory takes its time
#pragma unroll
    for (int32_t v = 0; v < CopyRing::kVectors; ++v) held[v] = load_shared(copy + v * CopyRing::kVectorBytes);
#pragma unroll
    for (int32_t v = 0; v < CopyRing::kVectors; ++v) {
      const int32_t offset = v * CopyRing::kVectorBytes;
      if (offset < at.left()) *reinterpret_cast<uint4*>(place + offset) = held[v];
    }
    load();
  }
  copies.finish();
}

// Copies these rows of a task's block from [T, H] in the sources' arenas into a ring; the rank's own from `mine`, since
// alone it stages none. Padding rows become zero.
__device__ __forceinline__ void pull(const Rank& rank, const Plan& plan, const DeviceRows& arena, const Task& t,
                                     Range rows, const bf16* mine, int64_t source_offset, bf16* ring,
                                     CopyRing& copies) {
  const int64_t h = rank.shape.hidden_size;
  const int32_t real = smaller(rows.size(), larger(0, plan.real_rows(t.expert, t.block) - rows.begin));
  const RowSource* table = rank.row_table + t.block * kRowBlock + rows.begin;
  bf16* to = ring + (plan.ring_block(t.block) * kRowBlock + rows.begin) * h;
  const auto source_of = [&](int32_t i) {
    const RowSource source = table[i];
    const bf16* from = source.rank == plan.rank ? mine : rank.in_arena<bf16>(source.rank, source_offset);
    return from + source.slot / static_cast<int32_t>(rank.shape.top_k) * h;
  };
  copy_rows(real, static_cast<int32_t>(h) * 2, reinterpret_cast<uint8_t*>(to), source_of, copies);
  uint4* rest = reinterpret_cast<uint4*>(to + real * h);
  for (int64_t i = lane_index(); i < (rows.size() - real) * h / 8; i += 32) rest[i] = uint4{};
}

// The router weights of the same rows; of padding rows 0.
__device__ __forceinline__ void pull_weights(const Rank& rank, const Plan& plan, const DeviceRows& arena, const Task& t,
                                             Range rows, float* row_weights) {
  const int32_t row = rows.begin + lane_index();
  if (row >= rows.end) return;
  const RowSource source = rank.row_table[t.block * kRowBlock + row];
  float weight = 0.f;
  if (source.rank >= 0) {
    const float* weights = rank.in_arena<float>(source.rank, arena.weights);
    weight = __int_as_float(load_relaxed_sys(reinterpret_cast<const int32_t*>(weights + source.slot)));
  }
  row_weights[plan.ring_block(t.block) * kRowBlock + row] = weight;
}

__device__ __forceinline__ void run_pull(const ForwardRank& rank, const Plan& plan, const DeviceRows& arena,
                                         const Task& t, Range rows, CopyRing& copies) {
  pull(rank, plan, arena, t, rows, rank.x, arena.x, rank.rows, copies);
}
__device__ __forceinline__ void run_pull(const BackwardRank& rank, const Plan& plan, const DeviceRows& arena,
                                         const Task& t, Range rows, CopyRing& copies) {
  const bool grads = t.kind == TaskKind::pull_grads;
  if (grads) pull_weights(rank, plan, arena, t, rows, rank.row_weights);
  pull(rank, plan, arena, t, rows, grads ? rank.dy : rank.x, grads ? arena.dy : arena.x, grads ? rank.grads : rank.rows,
       copies);
}

__device__ __forceinline__ void signal(const Task& task, int32_t* counters) {
  for (int32_t i = 0; i < task.signal_count; ++i) add_release_gpu(counters + task.signals[i], 1);
}

// Of each 32 rows, the first lane of those with the same source counts them. A fence takes longer than all else here.
__device__ __forceinline__ void notify_sources(const Rank& rank, const Task& t) {
  constexpr int32_t kRounds = static_cast<int32_t>(kRowBlock) / 32;
  const RowSource* rows = rank.row_table + t.block * kRowBlock;
  const int32_t lane = lane_index();
  int32_t sources[kRounds];
#pragma unroll
  for (int32_t i = 0; i < kRounds; ++i) sources[i] = rows[i * 32 + lane].rank;
  fence_sys();
#pragma unroll
  for (int32_t i = 0; i < kRounds; ++i) {
    const uint32_t same = __match_any_sync(0xffffffff, sources[i]);
    if (sources[i] < 0 || lane != __ffs(same) - 1) continue;
    add_relaxed_sys(&rank.meetings[sources[i]]->arrived[t.part].rows, __popc(same));
  }
}

// One communication worker: claims tasks of the communication list, those after the first pulls, until it is done or
// the call has failed.
template <KernelRank R>
__device__ __forceinline__ void communicate(const R& rank, const Schedule& schedule, int64_t call,
                                            CommunicationBuffer& buffer) {
  const Plan& plan = schedule.plan;
  const TaskList& list = schedule.communication;
  const DeviceRows arena(rank.shape);
  const CounterMap map(plan);
  int32_t* counters = rank.template in_workspace<int32_t>(WorkspaceLayout(rank.shape).counters);
  CopyRing copies(buffer.copies);
  const int32_t lane = lane_index();
  while (true) {
    if (lane == 0) {
      const int64_t ticket = schedule.first_pulls + add(rank.header().communication_ticket, 1);
      buffer.go_on = ticket < list.tasks;
      if (buffer.go_on) {
        write_task<R::kDirection>(plan, list.segment_of(ticket), ticket, buffer.task);
        buffer.go_on = wait_for_task(rank, map, counters, buffer.task);
      }
    }
    __syncwarp();
    if (!buffer.go_on) return;
    const Task& task = buffer.task;
    if (task.kind == TaskKind::notify) {
      notify_sources(rank, task);
    } else if (task.kind == TaskKind::reduce) {
      run_reduce(rank, call, task, buffer.block, copies);
    } else {
      run_pull(rank, plan, arena, task, pulled_rows(task), copies);
      R::Fences::before_release();
      __syncwarp();
      if (lane == 0) signal(task, counters);
    }
    __syncwarp();
  }
}

}  // namespace mok::cuda
