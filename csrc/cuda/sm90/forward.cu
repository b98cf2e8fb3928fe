// The forward megakernel on Hopper: gate and up tiles with SwiGLU, down tiles whose rows go straight to their slots, and
// the reduce.
#include "cuda/sm90/gate_up.cuh"

namespace mok::cuda::sm90 {
namespace {

struct Forward {
  using Rank = ForwardRank;

  __device__ static __forceinline__ int32_t stages(const Rank& rank, const Plan&, const Task& t) {
    if (t.kind == TaskKind::reduce) return 0;
    const int64_t depth = t.kind == TaskKind::gate_up ? rank.shape.hidden : rank.shape.intermediate;
    return static_cast<int32_t>(ceil_div(depth, kTileDepth));
  }

  template <class Between>
  __device__ static __forceinline__ void load(const Rank& rank, Shared& s, const Task& t, Stages& stages,
                                              const Between& between) {
    if (t.kind == TaskKind::gate_up) load_gate_up(rank, s, t, stages, between);
    if (t.kind == TaskKind::down) load_down(rank, s, t, stages, between);
  }

  template <class Between>
  __device__ static __forceinline__ void load_down(const Rank& rank, Shared& s, const Task& t, Stages& stages,
                                                   const Between& between) {
    const int32_t steps = static_cast<int32_t>(ceil_div(rank.shape.intermediate, kTileDepth));
    const int32_t row = s.schedule.plan.ring_block(t.block) * static_cast<int32_t>(kRowBlock);
    const int32_t column = t.part * kTileColumns, expert = t.expert;
    for (int32_t step = 0; step < steps; ++step) {
      between(step);
      const int32_t k = step * kTileDepth;
      uint8_t* stage = stages.acquire(s.tiles, kStageBytes);
      uint64_t* full = stages.full(s.tiles);
      tensor_load_2d(stage, &rank.hidden_128, k, row, full);
#pragma unroll
      for (int32_t i = 0; i < 4; ++i) {
        tensor_load_3d(stage + kLeftBytes + i * kBoxBytes, &rank.wo_32, column + i * kBoxColumns, k, expert, full);
      }
      stages.advance();
    }
  }

  __device__ static __forceinline__ void stage_hidden(const Accumulators& acc, float limit, Shared& s, Math& math) {
    math.staging.acquire(s.tiles);
    const uint32_t address = Staging::box_address(s.tiles);
#pragma unroll
    for (int32_t i = 0; i < kAccumulators / 16; ++i) {
      float hidden[8];
#pragma unroll
      for (int32_t j = 0; j < 8; ++j) {
        const float gate = clamp_gate(acc[8 * i + j], limit);
        const float up = clamp_up(acc[8 * i + j + kAccumulators / 2], limit);
        hidden[j] = __fmul_rn(__fmul_rn(gate, sigmoid(gate)), up);
      }
      Staging::write_box(address, i, hidden);
    }
    math.staging.release(s.tiles);
  }

  __device__ static __forceinline__ void compute(const Rank& rank, Shared& s, const Task& t, Math& math) {
    const Plan& plan = s.schedule.plan;
    if (t.kind == TaskKind::reduce) return reduce_tokens<true>(rank, s.call, t.block, thread_index() / 32, kMathWarps);
    Accumulators acc;
    math.multiply<Layout::activations_weights>(acc, s, stages(rank, plan, t));
    if (t.kind == TaskKind::down) return math.stage_rows(acc, s);
    if (t.macrobatch == 0 && rank.pre_activations) {
      store_pre_activations(acc, pre_activation_tile(rank.pre_activations, rank, plan, t.block, t.part));
    }
    stage_hidden(acc, rank.activation_limit, s, math);
  }

  __device__ static __forceinline__ void store(const Rank& rank, Shared& s, const DeviceArena& arena, const Task& t,
                                               int32_t group, StoreSide& side) {
    const Plan& plan = s.schedule.plan;
    if (t.kind == TaskKind::down) return push_rows(rank, plan, arena, t, group, side);
    const uint8_t* staged = side.acquire();
    if (lane_index() == 0) {
      const int32_t row = plan.ring_block(t.block) * static_cast<int32_t>(kRowBlock) + group * kGroupRows;
#pragma unroll
      for (int32_t i = 0; i < kGateUpColumns / kBoxColumns; ++i) {
        tensor_store_2d(&rank.hidden_64, staged + i * kStagingBox, t.part * kGateUpColumns + i * kBoxColumns, row);
      }
    }
    side.release();
  }

  __device__ static void spoil(const Rank& rank) { fill_nan(rank.out, rank.shape.tokens * rank.shape.hidden); }
};

__global__ void __launch_bounds__(kThreads, 1) forward(const __grid_constant__ Launch<ForwardRank> launch) {
  run<Forward>(launch);
}

}  // namespace

const void* forward_kernel() { return reinterpret_cast<const void*>(forward); }
int64_t shared_bytes() { return sizeof(Shared); }
int32_t threads() { return kThreads; }

TileCounts tile_counts(const Shape& s) {
  const auto tiles = [](int64_t n, int64_t width) { return static_cast<int32_t>(ceil_div(n, width)); };
  const int64_t h = s.hidden, i = s.intermediate;
  return {tiles(i, kGateUpColumns), tiles(h, kTileColumns), tiles(i, kTileColumns), tiles(h, kTileColumns),
          2 * tiles(h, kRowBlock) * tiles(i, kTileColumns) + tiles(i, kRowBlock) * tiles(h, kTileColumns)};
}

}  // namespace mok::cuda::sm90
