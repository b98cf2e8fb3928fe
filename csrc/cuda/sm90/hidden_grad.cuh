// hidden_grad: dy wo^T, then back through SwiGLU, with pre-activations that come through the ring of stages and results
// that leave from there; and the router gradient, as a dot of each row.
#pragma once

#include "cuda/activation.cuh"
#include "cuda/sm90/math.cuh"
#include "cuda/sm90/pre_activations.cuh"
#include "cuda/sm90/store.cuh"

namespace mok::cuda::sm90 {

inline constexpr int32_t kPartBytes = kBlockRows * kChunkColumns * 2;  // of a chunk: gate, up, or the weighted hidden
static_assert(3 * kPartBytes == kStageBytes);
inline constexpr int32_t kParkedPitch = 128 * 16;  // bytes between a thread's vectors in the staging area

class HiddenGrad {
 public:
  using Rank = BackwardRank;

  // A row's router weight, and the running dot of its gradient dy . (hidden wo) = (dy wo^T) . hidden.
  struct Row {
    bool real;
    float weight;
    float dot;
  };

  __device__ static __forceinline__ int64_t depth(const Shape& s) { return s.hidden_size; }

  // Those of a tile that have columns.
  __device__ static __forceinline__ int32_t chunks(const Shape& s, int32_t part) {
    const int64_t columns = smaller<int64_t>(kTileColumns, s.intermediate_size - part * kTileColumns);
    return static_cast<int32_t>(ceil_div(columns, kChunkColumns));
  }

  __device__ static __forceinline__ void load(const Rank& rank, Shared& s, const QueuedTask& t, Loader& loader) {
    const int32_t count = t.steps, row = t.ring_row, column = t.part * kTileColumns, expert = t.expert;
    for (int32_t step = 0; step < count; ++step) {
      const int32_t k = step * kStepDepth;
      load_step_k_major(s.tiles, loader, &rank.wo_128, k, column, expert,
                        [&](uint8_t* to, uint64_t* full) { tensor_load_2d(to, &rank.grads_128, k, row, full); });
    }
    const bool saved = t.macrobatch == 0 && rank.save != Save::nothing;
    const bf16* chunk = pre_activation_tile(saved ? rank.saved_pre_activations : rank.pre_activations, rank, t.ring_row,
                                            t.part * (kTileColumns / kGateUpColumns));
    for (int32_t i = 0; i < t.chunks; ++i) loader.chunk(s.tiles, chunk + i * kChunkElements, kChunkElements * 2);
  }

  // What the epilogue needs, known by the end of the product.
  struct Known {
    Row rows[2];
    float limit;
  };
  __device__ static __forceinline__ Known begin(const Rank& rank, const Product& p) {
    Known known;
    find_rows(rank, p, known.rows);
    known.limit = rank.activation_limit;
    return known;
  }

  __device__ static __forceinline__ void epilogue(const Accumulators& acc, Known& known, const Rank& rank, Shared& s,
                                                  const QueuedTask& t, Math& math) {
    known.limit < kInfinity ? through_swiglu<true>(acc, known.limit, known.rows, rank, s, t, math)
                            : through_swiglu<false>(acc, known.limit, known.rows, rank, s, t, math);
  }

  // One lane stores each chunk's three parts and gives its stage back for the math warps. A task without rows, after a
  // failure, has waited for nothing: others may still read what is in its place.
  __device__ static __forceinline__ void store(const Rank& rank, Shared& s, const QueuedTask& t, StoreSide& side) {
    for (int32_t chunk = 0; chunk < t.chunks; ++chunk) {
      const int32_t place = side.wait_chunk(s.tiles, t.steps + chunk);
      const uint8_t* stage = s.tiles.stages[place];
      const int32_t column = t.part * kTileColumns + chunk * kChunkColumns;
      if (t.real_rows > 0) {
        tensor_store_3d(&rank.gate_up_grads_128, stage, column, 0, t.ring_row);
        tensor_store_3d(&rank.gate_up_grads_128, stage + kPartBytes, column, 1, t.ring_row);
        tensor_store_2d(&rank.hidden_128, stage + 2 * kPartBytes, column, t.ring_row);
      }
      bulk_commit();
      bulk_wait_read<0>();
      mbarrier_arrive(&s.tiles.stage_empty[place], kMathArrivals);
    }
  }

 private:
  // The two rows of which this thread has accumulators.
  __device__ static __forceinline__ int32_t first_row() { return thread_index() / 32 * 16 + lane_index() / 4; }
  __device__ static __forceinline__ void find_rows(const Rank& rank, const Product& p, Row (&rows)[2]) {
#pragma unroll
    for (int32_t i = 0; i < 2; ++i) {
      const int32_t row = first_row() + 8 * i;
      rows[i].real = row < p.real_rows;
      rows[i].weight = rows[i].real ? __ldcg(rank.row_weights + p.ring_row + row) : 0.f;
      rows[i].dot = 0.f;
    }
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
      const float unweighted = i ? hidden_grad_1 : hidden_grad_0, grad = __fmul_rn(row.weight, unweighted);
      const SwigluGrads back = swiglu_grads<kLimited>(i ? gates.y : gates.x, i ? ups.y : ups.x, grad, limit);
      row.dot = __fmaf_rn(unweighted, back.hidden, row.dot);
      gate_grad[i] = back.gate;
      up_grad[i] = back.up;
      weighted_hidden[i] = __fmul_rn(row.weight, back.hidden);
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
  struct Parked {
    float4 a, b;

    __device__ __forceinline__ explicit Parked(uint32_t parked)
        : a(load_shared_f32(parked)), b(load_shared_f32(parked + kParkedPitch)) {}
  };

  // The hidden's gradient back through SwiGLU, in chunks of 64 columns, a stage each: gate becomes dgate, up becomes
  // dup, and the weighted hidden is third. Accumulators wait in the staging area, half of them at a time, so that the
  // chunks can be a loop: unrolled over registers it is 75 KB of instructions, and fetching those takes longer than
  // running them.
  template <bool kLimited>
  __device__ static __forceinline__ void through_swiglu(const Accumulators& acc, float limit, Row (&rows)[2],
                                                        const Rank& rank, Shared& s, const QueuedTask& t, Math& math) {
    const int32_t count = t.chunks;
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
  __device__ static __forceinline__ void mask(const Row (&rows)[2], Parked& grad, uint4& gate, uint4& up) {
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
    Parked next(grads);
#pragma unroll
    for (int32_t v = 0; v < kChunkVectors; ++v) {
      Parked grad = next;
      if (v + 1 < kChunkVectors) next = Parked(grads + (v + 1) * 2 * kParkedPitch);
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
};

}  // namespace mok::cuda::sm90
