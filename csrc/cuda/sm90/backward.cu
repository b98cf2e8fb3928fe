// The backward megakernel on Hopper. hidden_grad: dy wo^T, then back through SwiGLU on pre-activations that pass
// through the ring of stages; row_grad: one accumulation over gate and up, its rows straight to their slots;
// weight_grad: a tile of one expert's gradient, summed over its rows in order.
#include "cuda/sm90/gate_up.cuh"

namespace mok::cuda::sm90 {
namespace {

constexpr int32_t kBlockRows = static_cast<int32_t>(kRowBlock);
constexpr int32_t kPartBytes = kBlockRows * kChunkColumns * 2;  // of a chunk: gate, up, or the weighted hidden
static_assert(3 * kPartBytes == kStageBytes);
constexpr int32_t kParkedPitch = 128 * 16;  // bytes between a thread's vectors in the staging area

// Of weight_grad. With fewer steps, to wait for each other costs what it saves.
constexpr int32_t kLeastSharedSteps = 16;
// At most so many tiles above each other are a run: while runs follow each other from left to right, their left operand
// stays in the cache.
constexpr int32_t kRunRows = 32;

// Which matrix's gradient a weight_grad task computes, and which tile of it. Those of wi_0 and wi_1 have the left
// operand in common, and count as one matrix of twice as many columns.
struct WeightTile {
  int32_t matrix;  // 0: wi_0, 1: wi_1, 2: wo
  int32_t row, column;
  int32_t index, high;  // of `high` tiles above each other, neighbours in the list, this is number `index`

  __device__ __forceinline__ WeightTile(const Shape& s, int32_t part) {
    const int32_t wi_across = static_cast<int32_t>(ceil_div(s.intermediate, kTileColumns));
    const int32_t wi_down = static_cast<int32_t>(ceil_div(s.hidden, kRowBlock)), wi_tiles = 2 * wi_across * wi_down;
    const bool wo = part >= wi_tiles;
    const int32_t tile = wo ? part - wi_tiles : part;
    const int32_t across = wo ? static_cast<int32_t>(ceil_div(s.hidden, kTileColumns)) : 2 * wi_across;
    const int32_t down = wo ? static_cast<int32_t>(ceil_div(s.intermediate, kRowBlock)) : wi_down;
    const int32_t first = tile / (kRunRows * across) * kRunRows, rest = tile % (kRunRows * across);
    high = smaller(kRunRows, down - first);
    index = rest % high;
    row = (first + index) * kBlockRows;
    const int32_t right = rest / high;
    matrix = wo ? 2 : right / wi_across;
    column = (wo ? right : right % wi_across) * kTileColumns;
  }
};

struct Backward {
  using Rank = BackwardRank;

  __device__ static __forceinline__ void look_up(const Rank& rank, const Plan& plan, QueuedTask& t) {
    if (t.kind == TaskKind::weight_grad) {
      // All rows of a piece but the padding of its last block beyond a whole step.
      const int64_t whole = int64_t{t.blocks - 1} * kBlockRows;
      t.steps = t.blocks > 0 ? steps_of(whole + plan.real_rows(t.block + t.blocks - 1)) : 0;
      t.begun = plan.begins_earlier(t.macrobatch, t.expert);
      t.goes_on = plan.ends_later(t.macrobatch, t.expert);
      return;
    }
    t.real_rows = plan.real_rows(t.block);
    t.steps = steps_of(t.kind == TaskKind::row_grad ? rank.shape.intermediate : rank.shape.hidden);
    if (t.kind == TaskKind::row_grad) t.steps *= 2;
    if (t.kind == TaskKind::hidden_grad) {  // chunks that have columns
      const int64_t columns = smaller<int64_t>(kTileColumns, rank.shape.intermediate - t.part * kTileColumns);
      t.chunks = static_cast<int32_t>(ceil_div(columns, kChunkColumns));
    }
  }

  // Of weight_grad, tiles above each other.
  __device__ static __forceinline__ PlaceInRun place_in_run(const Rank& rank, const QueuedTask& t) {
    if (t.kind != TaskKind::weight_grad) return {t.in_run, t.run};
    if (t.steps < kLeastSharedSteps) return {0, 1};
    const WeightTile tile(rank.shape, t.part);
    return {tile.index, tile.high};
  }

  // ---- Loads.

  __device__ static __forceinline__ void load(const Rank& rank, Shared& s, const QueuedTask& t, Loader& loader) {
    switch (t.kind) {
      case TaskKind::gate_up:
        return load_gate_up(rank, s, t, loader);
      case TaskKind::hidden_grad:
        return load_hidden_grad(rank, s, t, loader);
      case TaskKind::row_grad:
        return load_row_grad(rank, s, t, loader);
      default:
        return load_weight_grad(rank, s, t, loader);
    }
  }

  // One step of a product whose operands both have K contiguous, from [rows, K] and [columns, K].
  template <class LoadLeft>
  __device__ static __forceinline__ void load_dgrad_step(Shared& s, Loader& loader, const CUtensorMap* right, int32_t k,
                                                         int32_t column, int32_t expert, const LoadLeft& load_left) {
    loader.step(s.tiles, load_left, [&](int32_t half, uint8_t* to, uint64_t* full, bool both) {
      load_3d(to, right, k, column + half * kHalfColumns, expert, full, both);
    });
  }

  __device__ static __forceinline__ void load_hidden_grad(const Rank& rank, Shared& s, const QueuedTask& t,
                                                          Loader& loader) {
    const int32_t count = t.steps, row = t.ring_row, column = t.part * kTileColumns, expert = t.expert;
    for (int32_t step = 0; step < count; ++step) {
      const int32_t k = step * kStepDepth;
      load_dgrad_step(s, loader, &rank.wo_128, k, column, expert,
                      [&](uint8_t* to, uint64_t* full) { tensor_load_2d(to, &rank.grads_128, k, row, full); });
    }
    const bool saved = t.macrobatch == 0 && rank.save != Save::nothing;
    const bf16* chunk = pre_activation_tile(saved ? rank.saved_pre_activations : rank.pre_activations, rank, t.ring_row,
                                            t.part * (kTileColumns / kGateUpColumns));
    for (int32_t i = 0; i < t.chunks; ++i) loader.chunk(s.tiles, chunk + i * kChunkElements, kChunkElements * 2);
  }

  __device__ static __forceinline__ void load_row_grad(const Rank& rank, Shared& s, const QueuedTask& t,
                                                       Loader& loader) {
    const int32_t count = t.steps / 2, row = t.ring_row, column = t.part * kTileColumns, expert = t.expert;
    for (int32_t which = 0; which < 2; ++which) {
      const CUtensorMap* weights = which ? &rank.wi_1_128 : &rank.wi_0_128;
      for (int32_t step = 0; step < count; ++step) {
        const int32_t k = step * kStepDepth;
        load_dgrad_step(s, loader, weights, k, column, expert, [&](uint8_t* to, uint64_t* full) {
          tensor_load_3d(to, &rank.gate_up_grads_128, k, which, row, full);
        });
      }
    }
  }

  __device__ static __forceinline__ void load_weight_grad(const Rank& rank, Shared& s, const QueuedTask& t,
                                                          Loader& loader) {
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

  // ---- Math.

  __device__ static __forceinline__ void compute(const Rank& rank, Shared& s, const QueuedTask& t, Math& math) {
    if (t.kind != TaskKind::weight_grad && !math.has_rows(t)) return pass(s, t, math);
    Accumulators acc;
    switch (t.kind) {
      case TaskKind::gate_up:
        math.multiply<Layout::activations_weights>(acc, s, t);
        store_pre_activations(acc, pre_activation_tile(rank.pre_activations, rank, t.ring_row, t.part));
        return math.stage_nothing(s);
      case TaskKind::hidden_grad:
        return compute_hidden_grad(acc, rank, s, t, math);
      case TaskKind::row_grad:
        math.multiply<Layout::activations_weights_k>(acc, s, t);
        return math.stage_rows(acc, s);
      default:
        return compute_weight_grad(acc, rank, s, t, math);
    }
  }
  __device__ static __forceinline__ void pass(Shared& s, const QueuedTask& t, Math& math) {
    math.pass_steps(s, t.steps, math.shared_steps(t));
    for (int32_t i = 0; i < t.chunks; ++i) {
      math.pass_stage(s, [&] { mbarrier_arrive(math.stages.chunk_full(s.tiles)); });
    }
    if (t.kind != TaskKind::hidden_grad) math.stage_nothing(s);
  }

  // A row's router weight, and the running dot of its gradient dy . (hidden wo) = (dy wo^T) . hidden.
  struct Row {
    bool real;
    float weight;
    float dot;
  };
  // The two rows of which this thread has accumulators.
  __device__ static __forceinline__ int32_t first_row() { return thread_index() / 32 * 16 + lane_index() / 4; }
  __device__ static __forceinline__ void find_rows(const Rank& rank, const QueuedTask& t, Row (&rows)[2]) {
#pragma unroll
    for (int32_t i = 0; i < 2; ++i) {
      const int32_t row = first_row() + 8 * i;
      rows[i].real = row < t.real_rows;
      rows[i].weight = rows[i].real ? __ldcg(rank.row_weights + t.ring_row + row) : 0.f;
      rows[i].dot = 0.f;
    }
  }

  __device__ static __forceinline__ void compute_hidden_grad(Accumulators& acc, const Rank& rank, Shared& s,
                                                             const QueuedTask& t, Math& math) {
    Row rows[2];
    find_rows(rank, t, rows);  // by the end of the product they are here
    math.multiply<Layout::activations_weights_k>(acc, s, t);
    if (is_limited(rank)) return through_swiglu<true>(acc, rows, rank, s, t, math);
    through_swiglu<false>(acc, rows, rank, s, t, math);
  }

  // From two neighbouring columns of a row: gate and up in, their gradients and the weighted hidden out; all as pairs
  // of bf16.
  template <bool kLimited>
  __device__ static __forceinline__ void swiglu_pair(Row& row, float hidden_grad_0, float hidden_grad_1, float limit,
                                                     uint32_t& gate, uint32_t& up, uint32_t& weighted) {
    const float2 gates = __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(gate));
    const float2 ups = __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(up));
    float gate_grad[2], up_grad[2], weighted_hidden[2];
#pragma unroll
    for (int32_t i = 0; i < 2; ++i) {
      const float raw_gate = i ? gates.y : gates.x, raw_up = i ? ups.y : ups.x;
      const float unweighted = i ? hidden_grad_1 : hidden_grad_0, grad = __fmul_rn(row.weight, unweighted);
      const float g = clamp_gate<kLimited>(raw_gate, limit), u = clamp_up<kLimited>(raw_up, limit);
      const float s = sigmoid(g), silu = __fmul_rn(g, s), hidden = __fmul_rn(silu, u);
      const float slope = __fmaf_rn(silu, 1.f - s, s);
      row.dot = __fmaf_rn(unweighted, hidden, row.dot);
      gate_grad[i] = kLimited && raw_gate > limit ? 0.f : __fmul_rn(__fmul_rn(grad, u), slope);
      up_grad[i] = kLimited && (raw_up > limit || raw_up < -limit) ? 0.f : __fmul_rn(grad, silu);
      weighted_hidden[i] = __fmul_rn(row.weight, hidden);
    }
    gate = pack_bf16(gate_grad[0], gate_grad[1]);
    up = pack_bf16(up_grad[0], up_grad[1]);
    weighted = pack_bf16(weighted_hidden[0], weighted_hidden[1]);
  }

  // What a thread holds of a chunk: 8 columns of both rows a vector, pairs of rows 0, 1, 0, 1.
  struct Chunk {
    uint4 gate[kChunkVectors], up[kChunkVectors];

    __device__ __forceinline__ explicit Chunk(uint32_t fragments) {
#pragma unroll
      for (int32_t v = 0; v < kChunkVectors; ++v) {
        gate[v] = load_shared(fragments + v * 512);
        up[v] = load_shared(fragments + kPartBytes + v * 512);
      }
    }
  };
  // A vector's gradient of the hidden.
  struct HiddenGrad {
    float4 a, b;

    __device__ __forceinline__ explicit HiddenGrad(uint32_t parked)
        : a(load_shared_f32(parked)), b(load_shared_f32(parked + kParkedPitch)) {}
  };

  // The hidden's gradient back through SwiGLU, in chunks of 64 columns, a stage each: gate becomes dgate, up becomes
  // dup, and the weighted hidden is third. Accumulators wait in the staging area, half of them at a time, so that the
  // chunks can be a loop: unrolled over registers it is 75 KB of instructions, and fetching those takes longer than
  // running them.
  template <bool kLimited>
  __device__ static __forceinline__ void through_swiglu(const Accumulators& acc, Row (&rows)[2], const Rank& rank,
                                                        Shared& s, const QueuedTask& t, Math& math) {
    const float limit = rank.activation_limit;
    const int32_t count = t.chunks;
    math.staging.acquire(s.tiles);
    // Two chunks from half of the accumulators.
    const auto half = [&](const float* acc, int32_t begin) {
      const uint32_t parked = math.park_address(s);
      park(acc, parked);
#pragma unroll 1
      for (int32_t chunk = begin; chunk < smaller(begin + 2, count); ++chunk) {
        const uint32_t stage = math.stages.wait_full(s.tiles);
        Chunk held(stage + fragment_offset() * 2);
        __syncwarp();  // the warp's results take the place of what the warp has read
        const uint32_t grads = parked + (chunk - begin) * (2 * kChunkVectors * kParkedPitch);
        store_results<kLimited>(held, grads, rows, limit, stage, t.real_rows < kBlockRows);
        if (chunk == count - 1) store_router_parts(rank, t, rows);
        fence_proxy_async_shared();
        __syncwarp();
        if (arrives()) mbarrier_arrive(math.stages.chunk_full(s.tiles));
        math.stages.advance();
      }
    };
    half(acc, 0);
    if (count > 2) half(acc + kAccumulators / 2, 2);
    // The area was only borrowed: no barrier tells a warp that goes on to its next task, and stages there, that the
    // others have read what they had parked.
    math.meet_warpgroup();
  }

  // Half of a thread's accumulators, as 16-byte vectors of the warpgroup's threads side by side.
  __device__ static __forceinline__ void park(const float* acc, uint32_t parked) {
#pragma unroll
    for (int32_t i = 0; i < kAccumulators / 8; ++i) {
      store_shared_f32(parked + i * kParkedPitch,
                       make_float4(acc[4 * i], acc[4 * i + 1], acc[4 * i + 2], acc[4 * i + 3]));
    }
  }

  // A padding row counts as zeros, whatever infinite weights made of it.
  __device__ static __forceinline__ void mask(const Row (&rows)[2], HiddenGrad& grad, uint4& gate, uint4& up) {
    if (!rows[0].real) {
      gate.x = gate.z = up.x = up.z = 0;
      grad.a.x = grad.a.y = grad.b.x = grad.b.y = 0.f;
    }
    if (!rows[1].real) {
      gate.y = gate.w = up.y = up.w = 0;
      grad.a.z = grad.a.w = grad.b.z = grad.b.w = 0.f;
    }
  }

  // Into boxes of 128 rows of 128 bytes in the 128-byte swizzle.
  template <bool kLimited>
  __device__ static __forceinline__ void store_results(Chunk& held, uint32_t grads, Row (&rows)[2], float limit,
                                                       uint32_t stage, bool masked) {
    const int32_t lane = lane_index(), row = thread_index() / 32 * 16 + lane / 8 % 2 * 8 + lane % 8;
    const uint32_t result = stage + row * 128;
    HiddenGrad next(grads);
#pragma unroll
    for (int32_t v = 0; v < kChunkVectors; ++v) {
      HiddenGrad grad = next;
      if (v + 1 < kChunkVectors) next = HiddenGrad(grads + (v + 1) * 2 * kParkedPitch);
      uint4 &gate = held.gate[v], &up = held.up[v], weighted;
      if (masked) mask(rows, grad, gate, up);
      swiglu_pair<kLimited>(rows[0], grad.a.x, grad.a.y, limit, gate.x, up.x, weighted.x);
      swiglu_pair<kLimited>(rows[1], grad.a.z, grad.a.w, limit, gate.y, up.y, weighted.y);
      swiglu_pair<kLimited>(rows[0], grad.b.x, grad.b.y, limit, gate.z, up.z, weighted.z);
      swiglu_pair<kLimited>(rows[1], grad.b.z, grad.b.w, limit, gate.w, up.w, weighted.w);
      const uint32_t to = result + (((v * 2 + lane / 16) ^ (lane % 8)) << 4);
      store_matrices(to, gate.x, gate.y, gate.z, gate.w);
      store_matrices(to + kPartBytes, up.x, up.y, up.z, up.w);
      store_matrices(to + 2 * kPartBytes, weighted.x, weighted.y, weighted.z, weighted.w);
    }
  }

  // Four lanes share a row.
  __device__ static __forceinline__ void store_router_parts(const Rank& rank, const QueuedTask& t,
                                                            const Row (&rows)[2]) {
#pragma unroll
    for (int32_t i = 0; i < 2; ++i) {
      float dot = rows[i].dot;
      dot += __shfl_xor_sync(0xffffffff, dot, 1);
      dot += __shfl_xor_sync(0xffffffff, dot, 2);
      const int64_t row = t.ring_row + first_row() + 8 * i;
      if (lane_index() % 4 == 0) rank.router_parts[row * rank.tiles.hidden_grad + t.part] = dot;
    }
  }

  __device__ static __forceinline__ void compute_weight_grad(Accumulators& acc, const Rank& rank, Shared& s,
                                                             const QueuedTask& t, Math& math) {
    if (t.begun) {
      load_straddle(acc, straddle_of(rank, t));
    } else if (t.steps == 0) {
#pragma unroll
      for (float& v : acc) v = 0.f;
    }
    if (t.steps > 0) math.multiply<Layout::both_transposed>(acc, s, t, t.begun);
    if (t.goes_on) {
      store_straddle(acc, straddle_of(rank, t));
      math.stage_nothing(s);
    } else if (rank.grads_in_f32) {
      stage_f32<0>(acc, s, math);
      stage_f32<kAccumulators / 2>(acc, s, math);
    } else {
      stage_bf16(acc, s, math);
    }
  }

  // Accumulators of an unfinished gradient, in the order of registers: coalesced 16 bytes a thread.
  __device__ static __forceinline__ float4* straddle_of(const Rank& rank, const Task& t) {
    return reinterpret_cast<float4*>(rank.straddle + int64_t{t.part} * kBlockRows * kTileColumns) + thread_index();
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

  __device__ static __forceinline__ void stage_bf16(const Accumulators& acc, Shared& s, Math& math) {
    math.staging.acquire(s.tiles);
    const uint32_t address = Staging::box_address(s.tiles);
#pragma unroll
    for (int32_t i = 0; i < kAccumulators / 8; ++i) Staging::write_box(address, i, acc + 8 * i);
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

  // ---- Stores.

  __device__ static __forceinline__ void store(const Rank& rank, Shared& s, const DeviceArena& arena,
                                               const QueuedTask& t, StoreSide& side) {
    switch (t.kind) {
      case TaskKind::gate_up:
        return store_nothing(s, side);
      case TaskKind::hidden_grad:
        if (lane_index() == 0) store_chunks(rank, s, t, side);
        return;
      case TaskKind::row_grad:
        push_rows(rank, arena, t, s, side);
        if (t.part == 0) push_router_grads(rank, arena, t);
        return;
      default:
        return t.goes_on ? store_nothing(s, side) : store_weight_grad(rank, s, t, side);
    }
  }

  // The math warps have stored by themselves.
  __device__ static __forceinline__ void store_nothing(Shared& s, StoreSide& side) {
    for (int32_t group = 0; group < 2; ++group) {
      side.acquire(s.tiles, group);
      side.release(s.tiles, group);
    }
    side.advance();
  }

  // One lane stores each chunk's three parts and gives its stage back for the math warps. A task without rows, after a
  // failure, has waited for nothing: others may still read what is in its place.
  __device__ static __forceinline__ void store_chunks(const Rank& rank, Shared& s, const QueuedTask& t,
                                                      StoreSide& side) {
    for (int32_t chunk = 0; chunk < t.chunks; ++chunk) {
      const int32_t slot = side.wait_chunk(s.tiles, t.steps + chunk);
      const uint8_t* stage = s.tiles.stages[slot];
      const int32_t column = t.part * kTileColumns + chunk * kChunkColumns;
      if (t.real_rows > 0) {
        tensor_store_3d(&rank.gate_up_grads_128, stage, column, 0, t.ring_row);
        tensor_store_3d(&rank.gate_up_grads_128, stage + kPartBytes, column, 1, t.ring_row);
        tensor_store_2d(&rank.hidden_128, stage + 2 * kPartBytes, column, t.ring_row);
      }
      bulk_commit();
      bulk_wait_read<0>();
      mbarrier_arrive(&s.tiles.stage_empty[slot], kMathWarps * kArrivals);
    }
  }

  // The router gradient of each row: its parts, added in order of columns.
  __device__ static __forceinline__ void push_router_grads(const Rank& rank, const DeviceArena& arena,
                                                           const QueuedTask& t) {
    for (int32_t i = lane_index(); i < t.real_rows; i += 32) {
      const float* parts = rank.router_parts + int64_t{t.ring_row + i} * rank.tiles.hidden_grad;
      float sum = 0.f;
      for (int32_t part = 0; part < rank.tiles.hidden_grad; ++part) sum += __ldcg(parts + part);
      const RowSource to = rank.row_table[t.block * kRowBlock + i];
      rank.in_arena<float>(to.rank, arena.at(arena.layout.weight_grads))[to.slot] = sum;
    }
  }

  // Boxes of 64 rows, clipped at the matrix's edges; in f32 the tile comes in two halves.
  __device__ static __forceinline__ void store_weight_grad(const Rank& rank, Shared& s, const Task& t,
                                                           StoreSide& side) {
    const WeightTile tile(rank.shape, t.part);
    const CUtensorMap* map = tile.matrix == 0   ? &rank.wi_0_grad_64
                             : tile.matrix == 1 ? &rank.wi_1_grad_64
                                                : &rank.wo_grad_64;
    const int32_t box_columns = rank.grads_in_f32 ? kBoxColumns / 2 : kBoxColumns;
    for (int32_t first = 0; first < kTileColumns; first += 4 * box_columns) {
      for (int32_t group = 0; group < 2; ++group) {
        const uint8_t* staged = side.acquire(s.tiles, group);
        if (lane_index() < 4) {
          const int32_t column = tile.column + first + lane_index() * box_columns;
          tensor_store_3d(map, staged + lane_index() * kStagingBox, column, tile.row + group * kGroupRows, t.expert);
        }
        side.release(s.tiles, group);
      }
      side.advance();
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

__global__ void __cluster_dims__(kPair) __launch_bounds__(kThreads, 1)
    backward(const __grid_constant__ Launch<BackwardRank> launch) {
  run<Backward>(launch);
}

}  // namespace

const void* backward_kernel() { return reinterpret_cast<const void*>(backward); }

}  // namespace mok::cuda::sm90
