// The backward megakernel on Hopper. hidden_grad: dy wo^T, then back through SwiGLU on pre-activations that pass
// through the ring of stages; row_grad: one accumulation over gate and up, its rows straight to their slots;
// weight_grad: a tile of one expert's gradient, summed over its rows in order; and the reduce.
#include "cuda/sm90/gate_up.cuh"

namespace mok::cuda::sm90 {
namespace {

constexpr int32_t kChunkColumns = 64;            // of the hidden_grad epilogue: gate and up, 64 columns each
constexpr int32_t kChunkBytes = 2 * kLeftBytes;  // loaded; the results' third part is written only
constexpr int32_t kBoxRows = static_cast<int32_t>(kRowBlock);

// Which matrix's gradient a weight_grad task computes, and which tile of it.
struct WeightTile {
  int32_t matrix;  // 0: wi_0, 1: wi_1, 2: wo
  int32_t row, column;
  int64_t height, width;

  __device__ __forceinline__ WeightTile(const Shape& s, int32_t part) {
    const int32_t wi_across = static_cast<int32_t>(ceil_div(s.intermediate, kTileColumns));
    const int32_t wi_tiles = wi_across * static_cast<int32_t>(ceil_div(s.hidden, kRowBlock));
    matrix = part >= 2 * wi_tiles ? 2 : part >= wi_tiles ? 1 : 0;
    const int32_t tile = part - matrix * wi_tiles;
    const int32_t across = matrix == 2 ? static_cast<int32_t>(ceil_div(s.hidden, kTileColumns)) : wi_across;
    row = tile / across * kBoxRows;
    column = tile % across * kTileColumns;
    height = matrix == 2 ? s.intermediate : s.hidden;
    width = matrix == 2 ? s.hidden : s.intermediate;
  }
};

struct Backward {
  using Rank = BackwardRank;

  __device__ static __forceinline__ int32_t steps(const Rank& rank, const Task& t) {
    const Shape& s = rank.shape;
    switch (t.kind) {
      case TaskKind::gate_up:
      case TaskKind::hidden_grad:
        return static_cast<int32_t>(ceil_div(s.hidden, kTileDepth));
      case TaskKind::row_grad:
        return 2 * static_cast<int32_t>(ceil_div(s.intermediate, kTileDepth));
      case TaskKind::weight_grad:
        return t.blocks * (kBoxRows / kTileDepth);
      default:
        return 0;
    }
  }
  __device__ static __forceinline__ int32_t extra(const Task& t) {
    return t.kind == TaskKind::hidden_grad ? kTileColumns / kChunkColumns : 0;
  }

  // ---- Loads.

  __device__ static __forceinline__ void load(const Rank& rank, Shared& s, const Task& t, int32_t step,
                                              Stages& stages) {
    switch (t.kind) {
      case TaskKind::gate_up:
        return load_gate_up(rank, s, t, step, stages);
      case TaskKind::hidden_grad: {
        const int32_t chunk = step - steps(rank, t);
        return chunk < 0 ? load_hidden_grad(rank, s, t, step, stages) : load_chunk(rank, s, t, chunk, stages);
      }
      case TaskKind::row_grad:
        return load_row_grad(rank, s, t, step, stages);
      default:
        return load_weight_grad(rank, s, t, step, stages);
    }
  }

  __device__ static __forceinline__ int32_t ring_row(const Shared& s, int32_t block) {
    return s.schedule.plan.ring_block(block) * kBoxRows;
  }

  __device__ static __forceinline__ void load_hidden_grad(const Rank& rank, Shared& s, const Task& t, int32_t step,
                                                          Stages& stages) {
    uint8_t* stage = stages.acquire(s.tiles, kStageBytes);
    tensor_load_2d(stage, &rank.grads_128, step * kTileDepth, ring_row(s, t.block), stages.full(s.tiles));
    tensor_load_3d(stage + kLeftBytes, &rank.wo_256, step * kTileDepth, t.part * kTileColumns, t.expert,
                   stages.full(s.tiles));
    stages.advance();
  }

  __device__ static __forceinline__ void load_chunk(const Rank& rank, Shared& s, const Task& t, int32_t chunk,
                                                    Stages& stages) {
    const bool saved = t.macrobatch == 0 && s.schedule.plan.save != Save::nothing;
    const CUtensorMap* map = saved ? &rank.saved_pre_activations_128 : &rank.pre_activations_128;
    uint8_t* stage = stages.acquire(s.tiles, kChunkBytes);
    const int32_t column = t.part * kTileColumns + chunk * kChunkColumns;
    tensor_load_3d(stage, map, column, 0, ring_row(s, t.block), stages.full(s.tiles));
    tensor_load_3d(stage + kLeftBytes, map, column, 1, ring_row(s, t.block), stages.full(s.tiles));
    stages.advance();
  }

  __device__ static __forceinline__ void load_row_grad(const Rank& rank, Shared& s, const Task& t, int32_t step,
                                                       Stages& stages) {
    const int32_t half = steps(rank, t) / 2, which = step >= half, k = (step - which * half) * kTileDepth;
    uint8_t* stage = stages.acquire(s.tiles, kStageBytes);
    tensor_load_3d(stage, &rank.gate_up_grads_128, k, which, ring_row(s, t.block), stages.full(s.tiles));
    tensor_load_3d(stage + kLeftBytes, which ? &rank.wi_1_256 : &rank.wi_0_256, k, t.part * kTileColumns, t.expert,
                   stages.full(s.tiles));
    stages.advance();
  }

  __device__ static __forceinline__ void load_weight_grad(const Rank& rank, Shared& s, const Task& t, int32_t step,
                                                          Stages& stages) {
    const WeightTile tile(rank.shape, t.part);
    const int32_t row = ring_row(s, t.block + step / 2) + step % 2 * kTileDepth;
    uint8_t* stage = stages.acquire(s.tiles, kStageBytes);
    uint64_t* full = stages.full(s.tiles);
    const bool saved = t.macrobatch == 0 && rank.saved_rows;
    const CUtensorMap* left = tile.matrix == 2 ? &rank.hidden_64 : saved ? &rank.saved_rows_64 : &rank.rows_64;
    for (int32_t i = 0; i < 2; ++i) tensor_load_2d(stage + i * kBoxBytes, left, tile.row + i * kBoxColumns, row, full);
    for (int32_t i = 0; i < 4; ++i) {
      uint8_t* to = stage + kLeftBytes + i * kBoxBytes;
      const int32_t column = tile.column + i * kBoxColumns;
      if (tile.matrix == 2) {
        tensor_load_2d(to, &rank.grads_64, column, row, full);
      } else {
        tensor_load_3d(to, &rank.gate_up_grads_64, column, tile.matrix, row, full);
      }
    }
    stages.advance();
  }

  // ---- Math.

  __device__ static __forceinline__ void compute(const Rank& rank, Shared& s, const Task& t, Math& math) {
    Accumulators acc;
    switch (t.kind) {
      case TaskKind::gate_up:
        math.multiply<Layout::activations_weights>(acc, s, steps(rank, t));
        return math.stage(acc, s);
      case TaskKind::hidden_grad:
        math.multiply<Layout::activations_weights_k>(acc, s, steps(rank, t));
        return through_swiglu(acc, rank, s, t, math);
      case TaskKind::row_grad:
        math.multiply<Layout::activations_weights_k>(acc, s, steps(rank, t));
        return math.stage(acc, s);
      case TaskKind::weight_grad:
        return compute_weight_grad(acc, rank, s, t, math);
      default:
        reduce_tokens<false>(rank, s.call, t.block, thread_index() / 32, kMathWarps);
        return collect_router_grads(rank, s.call, t.block, thread_index(), kMathWarps * 32);
    }
  }

  // A row's router weight, and the running dot of its gradient dy . (hidden wo) = (dy wo^T) . hidden.
  struct Row {
    bool real;
    float weight;
    float dot;
  };

  // From two neighbouring columns of a row: gate and up in, their gradients and the weighted hidden out; all as pairs
  // of bf16. Padding rows give zeros, whatever their pre-activations were.
  __device__ static __forceinline__ void swiglu_pair(Row& row, const float* hidden_grad, float limit, uint32_t& gate,
                                                     uint32_t& up, uint32_t& weighted) {
    const float2 gates = __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(gate));
    const float2 ups = __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(up));
    float gate_grad[2], up_grad[2], weighted_hidden[2];
#pragma unroll
    for (int32_t i = 0; i < 2; ++i) {
      const float raw_gate = i ? gates.y : gates.x, raw_up = i ? ups.y : ups.x;
      const float g = clamp_gate(raw_gate, limit), u = clamp_up(raw_up, limit);
      const float s = sigmoid(g), silu = __fmul_rn(g, s), hidden = __fmul_rn(silu, u);
      const float grad = __fmul_rn(row.weight, hidden_grad[i]);
      const float slope = __fmaf_rn(silu, 1.f - s, s);
      if (row.real) row.dot = __fmaf_rn(hidden_grad[i], hidden, row.dot);
      gate_grad[i] = row.real && !(raw_gate > limit) ? __fmul_rn(__fmul_rn(grad, u), slope) : 0.f;
      up_grad[i] = row.real && !(raw_up > limit || raw_up < -limit) ? __fmul_rn(grad, silu) : 0.f;
      weighted_hidden[i] = row.real ? __fmul_rn(row.weight, hidden) : 0.f;
    }
    gate = pack_bf16(gate_grad[0], gate_grad[1]);
    up = pack_bf16(up_grad[0], up_grad[1]);
    weighted = pack_bf16(weighted_hidden[0], weighted_hidden[1]);
  }

  // Four chunks of 64 columns, each a stage: gate becomes dgate, up becomes dup, and the weighted hidden is third.
  __device__ static __forceinline__ void through_swiglu(const Accumulators& acc, const Rank& rank, Shared& s,
                                                        const Task& t, Math& math) {
    const int32_t lane = lane_index(), warp = thread_index() / 32, first = warp * 16 + lane / 4;
    const int64_t at = ring_row(s, t.block) + first;
    const int32_t real_rows = s.schedule.plan.real_rows(t.block);
    Row rows[2];
#pragma unroll
    for (int32_t i = 0; i < 2; ++i) {
      rows[i].real = first + 8 * i < real_rows;
      rows[i].weight = rows[i].real ? __ldcg(rank.row_weights + at + 8 * i) : 0.f;
      rows[i].dot = 0.f;
    }
    // Of the 16-byte pieces of a row of a chunk, piece p is at p xor (row mod 8): the 128-byte swizzle.
    const int32_t row = warp * 16 + lane / 8 % 2 * 8 + lane % 8;
#pragma unroll
    for (int32_t chunk = 0; chunk < kTileColumns / kChunkColumns; ++chunk) {
      const uint32_t stage = math.stages.wait_full(s.tiles);
#pragma unroll
      for (int32_t i = 0; i < kChunkColumns / 16; ++i) {
        const uint32_t address = stage + row * 128 + (((2 * i + lane / 16) ^ (row % 8)) << 4);
        uint4 gate = load_matrices(address), up = load_matrices(address + kLeftBytes), weighted;
        const float* grad = acc + chunk * 32 + i * 8;
        const float limit = rank.activation_limit;
        swiglu_pair(rows[0], grad, limit, gate.x, up.x, weighted.x);
        swiglu_pair(rows[1], grad + 2, limit, gate.y, up.y, weighted.y);
        swiglu_pair(rows[0], grad + 4, limit, gate.z, up.z, weighted.z);
        swiglu_pair(rows[1], grad + 6, limit, gate.w, up.w, weighted.w);
        store_matrices(address, gate.x, gate.y, gate.z, gate.w);
        store_matrices(address + kLeftBytes, up.x, up.y, up.z, up.w);
        store_matrices(address + 2 * kLeftBytes, weighted.x, weighted.y, weighted.z, weighted.w);
      }
      if (chunk == kTileColumns / kChunkColumns - 1) store_router_parts(rank, t, at, rows);
      fence_proxy_async_shared();
      __syncwarp();
      if (lane == 0) mbarrier_arrive(&s.tiles.chunk_full[math.chunk.slot()]);
      math.chunk.advance();
      math.stages.advance();
    }
  }

  // Four lanes share a row.
  __device__ static __forceinline__ void store_router_parts(const Rank& rank, const Task& t, int64_t at,
                                                            Row (&rows)[2]) {
#pragma unroll
    for (int32_t i = 0; i < 2; ++i) {
      float dot = rows[i].dot;
      dot += __shfl_xor_sync(0xffffffff, dot, 1);
      dot += __shfl_xor_sync(0xffffffff, dot, 2);
      if (thread_index() % 4 == 0) rank.router_parts[(at + 8 * i) * rank.tiles.hidden_grad + t.part] = dot;
    }
  }

  __device__ static __forceinline__ void compute_weight_grad(Accumulators& acc, const Rank& rank, Shared& s,
                                                             const Task& t, Math& math) {
    const Plan& plan = s.schedule.plan;
#pragma unroll
    for (float& v : acc) v = 0.f;
    if (plan.begins_earlier(t.macrobatch, t.expert)) load_straddle(acc, straddle_of(rank, t));
    if (t.blocks > 0) math.multiply<Layout::both_transposed, true>(acc, s, steps(rank, t));
    if (plan.ends_later(t.macrobatch, t.expert)) {
      store_straddle(acc, straddle_of(rank, t));
      math.staging.acquire(s.tiles);  // nothing is staged; the store warp learns that the accumulators are stored
      math.staging.release(s.tiles);
    } else if (rank.grads_in_f32) {
      stage_f32<0>(acc, s, math);
      stage_f32<kAccumulators / 2>(acc, s, math);
    } else {
      math.stage(acc, s);
    }
  }

  // Accumulators of an unfinished gradient, in the order of registers: coalesced 16 bytes a thread.
  __device__ static __forceinline__ float4* straddle_of(const Rank& rank, const Task& t) {
    return reinterpret_cast<float4*>(rank.straddle + int64_t{t.part} * kBoxRows * kTileColumns) + thread_index();
  }
  __device__ static __forceinline__ void load_straddle(Accumulators& acc, const float4* from) {
#pragma unroll
    for (int32_t i = 0; i < kAccumulators / 4; ++i) {
      const float4 v = __ldcg(from + i * kMathWarps * 32);
      acc[4 * i] = v.x;
      acc[4 * i + 1] = v.y;
      acc[4 * i + 2] = v.z;
      acc[4 * i + 3] = v.w;
    }
  }
  __device__ static __forceinline__ void store_straddle(const Accumulators& acc, float4* to) {
#pragma unroll
    for (int32_t i = 0; i < kAccumulators / 4; ++i) {
      to[i * kMathWarps * 32] = make_float4(acc[4 * i], acc[4 * i + 1], acc[4 * i + 2], acc[4 * i + 3]);
    }
  }

  // Half of the tile's columns in f32 fill a row of the staging area.
  template <int32_t first>
  __device__ static __forceinline__ void stage_f32(const Accumulators& acc, Shared& s, Math& math) {
    math.staging.acquire(s.tiles);
    const uint32_t address = Staging::f32_address(s.tiles);
#pragma unroll
    for (int32_t i = 0; i < kAccumulators / 2; i += 4) Staging::write_f32(address, i / 4, acc + first + i);
    math.staging.release(s.tiles);
  }

  // ---- Stores.

  __device__ static __forceinline__ void store(const Rank& rank, Shared& s, const DeviceArena& arena, const Task& t,
                                               int32_t group, StoreSide& side) {
    const Plan& plan = s.schedule.plan;
    switch (t.kind) {
      case TaskKind::gate_up:
        return store_pre_activations(rank, plan, t, group, rank.pre_activations, side);
      case TaskKind::hidden_grad:
        if (group == 0 && lane_index() == 0) store_chunks(rank, s, t, side);
        return;
      case TaskKind::row_grad:
        push_rows(rank, plan, arena, t, group, side);
        if (t.part == 0) push_router_grads(rank, plan, arena, t, group);
        return;
      default:
        return store_weight_grad(rank, plan, t, group, side);
    }
  }

  // One lane stores each chunk's three parts and gives its stage back for the math warps.
  __device__ static __forceinline__ void store_chunks(const Rank& rank, Shared& s, const Task& t, StoreSide& side) {
    const int32_t row = ring_row(s, t.block);
    for (int32_t chunk = 0; chunk < extra(t); ++chunk) {
      mbarrier_wait(&s.tiles.chunk_full[side.chunk.slot()], side.chunk.parity());
      side.chunk.advance();
      const int32_t slot = side.stage_after(steps(rank, t) + chunk);
      const uint8_t* stage = s.tiles.stages[slot];
      const int32_t column = t.part * kTileColumns + chunk * kChunkColumns;
      tensor_store_3d(&rank.gate_up_grads_128, stage, column, 0, row);
      tensor_store_3d(&rank.gate_up_grads_128, stage + kLeftBytes, column, 1, row);
      tensor_store_2d(&rank.hidden_128, stage + 2 * kLeftBytes, column, row);
      bulk_commit();
      bulk_wait_read<0>();
      mbarrier_arrive(&s.tiles.stage_empty[slot], kMathWarps);
    }
  }

  // The router gradient of each row: its parts, added in order of columns.
  __device__ static __forceinline__ void push_router_grads(const Rank& rank, const Plan& plan, const DeviceArena& arena,
                                                           const Task& t, int32_t group) {
    for (int32_t i = group * kGroupRows + lane_index(); i < (group + 1) * kGroupRows; i += 32) {
      if (i >= plan.real_rows(t.block)) continue;
      const float* parts = rank.router_parts + (plan.ring_block(t.block) * kRowBlock + i) * rank.tiles.hidden_grad;
      float sum = 0.f;
      for (int32_t part = 0; part < rank.tiles.hidden_grad; ++part) sum += __ldcg(parts + part);
      const RowSource to = rank.row_table[t.block * kRowBlock + i];
      rank.in_arena<float>(to.rank, arena.at(arena.layout.weight_grads))[to.slot] = sum;
    }
  }

  __device__ static __forceinline__ void store_weight_grad(const Rank& rank, const Plan& plan, const Task& t,
                                                           int32_t group, StoreSide& side) {
    if (plan.ends_later(t.macrobatch, t.expert)) {
      side.acquire();
      return side.release();
    }
    const WeightTile tile(rank.shape, t.part);
    const int64_t row = tile.row + group * kGroupRows;
    const int32_t count = static_cast<int32_t>(larger<int64_t>(0, smaller<int64_t>(kGroupRows, tile.height - row)));
    void* matrix = tile.matrix == 0 ? rank.wi_0_grad : tile.matrix == 1 ? rank.wi_1_grad : rank.wo_grad;
    const int64_t size = rank.grads_in_f32 ? 4 : 2, columns = rank.grads_in_f32 ? kTileColumns / 2 : kTileColumns;
    uint8_t* to = static_cast<uint8_t*>(matrix) + (t.expert * tile.height + row) * tile.width * size;
    for (int64_t column = tile.column; column < tile.column + kTileColumns; column += columns) {
      const uint8_t* staged = side.acquire();
      const int64_t bytes = size * smaller<int64_t>(columns, tile.width - column);
      if (bytes > 0) {
        store_rows(staged, count, bytes, [&](int32_t i) { return to + (i * tile.width + column) * size; });
      }
      side.release();
    }
  }

  __device__ static void spoil(const Rank& rank) {
    const Shape& s = rank.shape;
    const int64_t weights = s.local_experts * s.hidden * s.intermediate;
    fill_nan(rank.out, s.tokens * s.hidden);
    fill_nan(rank.expert_weight_grads, s.slots());
    for (void* grad : {rank.wi_0_grad, rank.wi_1_grad, rank.wo_grad}) {
      rank.grads_in_f32 ? fill_nan(static_cast<float*>(grad), weights) : fill_nan(static_cast<bf16*>(grad), weights);
    }
  }
};

__global__ void __launch_bounds__(kThreads, 1) backward(const __grid_constant__ Launch<BackwardRank> launch) {
  run<Backward>(launch);
}

}  // namespace

const void* backward_kernel() { return reinterpret_cast<const void*>(backward); }

}  // namespace mok::cuda::sm90
