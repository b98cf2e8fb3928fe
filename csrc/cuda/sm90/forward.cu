// The forward megakernel on Hopper: gate and up tiles with SwiGLU, and down tiles whose rows go straight to their
// slots.
#include "cuda/sm90/gate_up.cuh"
#include "cuda/sm90/megakernel.cuh"

namespace mok::cuda::sm90 {
namespace {

struct Forward {
  using Rank = ForwardRank;

  __device__ static __forceinline__ void look_up(const Rank& rank, const Plan& plan, QueuedTask& t) {
    t.steps = steps_of(t.kind == TaskKind::gate_up ? rank.shape.hidden : rank.shape.intermediate);
    t.real_rows = plan.real_rows(t.expert, t.block);
  }

  __device__ static __forceinline__ PlaceInRun place_in_run(const Rank&, const QueuedTask& t) {
    return {t.in_run, t.run};
  }

  __device__ static __forceinline__ void load(const Rank& rank, Shared& s, const QueuedTask& t, Loader& loader) {
    t.kind == TaskKind::gate_up ? load_gate_up(rank, s, t, loader) : load_down(rank, s, t, loader);
  }

  __device__ static __forceinline__ void load_down(const Rank& rank, Shared& s, const QueuedTask& t, Loader& loader) {
    const int32_t count = t.steps, row = t.ring_row, column = t.part * kTileColumns, expert = t.expert;
    for (int32_t step = 0; step < count; ++step) {
      const int32_t k = step * kStepDepth;
      loader.step(
          s.tiles, [&](uint8_t* to, uint64_t* full) { tensor_load_2d(to, &rank.hidden_128, k, row, full); },
          [&](int32_t half, uint8_t* to, uint64_t* full, bool both) {
            const int32_t first = column + half * kHalfColumns;
            load_3d(to, &rank.wo_64, first, k, expert, full, both);
            load_3d(to + kBoxBytes, &rank.wo_64, first + kBoxColumns, k, expert, full, both);
          });
    }
  }

  template <bool kLimited>
  __device__ static __forceinline__ void stage_hidden(const Accumulators& acc, float limit, Shared& s, Math& math) {
    const uint32_t address = Staging::box_address(s.tiles);
#pragma unroll
    for (int32_t i = 0; i < kAccumulators / 16; ++i) {
      float hidden[8];
#pragma unroll
      for (int32_t j = 0; j < 8; ++j) {
        const float gate = clamp_gate<kLimited>(acc[8 * i + j], limit);
        const float up = clamp_up<kLimited>(acc[8 * i + j + kAccumulators / 2], limit);
        hidden[j] = __fmul_rn(__fmul_rn(gate, sigmoid(gate)), up);
      }
      Staging::write_box(address, i, hidden);
    }
    math.staging.release(s.tiles);
  }

  __device__ static __forceinline__ void compute(const Rank& rank, Shared& s, const QueuedTask& t, const Product& p,
                                                 Math& math) {
    if (!math.has_rows(p)) {
      math.pass_steps(s, p.steps, p.shared_steps());
      return math.stage_nothing(s);
    }
    // By the end of the product it is known what comes after.
    const float limit = rank.activation_limit;
    bf16* saved = t.macrobatch == 0 ? rank.pre_activations : nullptr;
    Accumulators acc;
    math.multiply<Layout::activations_weights>(acc, s, p);
    if (p.kind == TaskKind::down) return math.stage_rows(acc, s);
    if (saved) store_pre_activations(acc, pre_activation_tile(saved, rank, t.ring_row, t.part));
    limit < kInfinity ? stage_hidden<true>(acc, limit, s, math) : stage_hidden<false>(acc, limit, s, math);
  }

  __device__ static __forceinline__ void store(const Rank& rank, Shared& s, const DeviceArena& arena,
                                               const QueuedTask& t, StoreSide& side) {
    if (t.kind == TaskKind::down) return push_rows(rank, arena, t, s, side);
    for (int32_t group = 0; group < 2; ++group) {
      const uint8_t* staged = side.acquire(s.tiles, group);
      if (lane_index() < kGateUpColumns / kBoxColumns && group * kGroupRows < t.real_rows) {
        const int32_t column = t.part * kGateUpColumns + lane_index() * kBoxColumns;
        tensor_store_2d(&rank.hidden_64, staged + lane_index() * kStagingBox, column, t.ring_row + group * kGroupRows);
      }
      side.release(s.tiles, group);
    }
    side.advance();
  }

  __device__ static void spoil(const Rank& rank) { fill_nan(rank.out, rank.shape.tokens * rank.shape.hidden); }
};

__global__ void __cluster_dims__(kPair) __launch_bounds__(kThreads, 1)
    forward(const __grid_constant__ Launch<ForwardRank> launch) {
  run<Forward>(launch);
}

}  // namespace

const void* forward_kernel() { return reinterpret_cast<const void*>(forward); }
int64_t shared_bytes() { return sizeof(Shared); }
int32_t threads() { return kThreads; }

TileCounts tile_counts(const Shape& s) {
  // With less depth the down tiles of a group are done before tokens are reduced over the one before; then more than
  // two groups only cost the cache's locality.
  return count_tiles(s, kTileColumns, kGateUpColumns, s.intermediate >= 2048 ? kColumnGroups : 2);
}

}  // namespace mok::cuda::sm90
