// The forward megakernel on Hopper, of two kinds of tiles: gate_up, with SwiGLU, and down.
#include "cuda/sm90/down.cuh"
#include "cuda/sm90/gate_up.cuh"
#include "cuda/sm90/kernels.h"
#include "cuda/sm90/megakernel.cuh"

namespace mok::cuda::sm90 {
namespace {

struct Forward {
  using Rank = ForwardRank;

  __device__ static __forceinline__ void look_up(const Rank& rank, const Plan& plan, QueuedTask& t) {
    t.steps = steps_of(t.kind == TaskKind::gate_up ? GateUp::depth(rank.shape) : Down::depth(rank.shape));
    t.real_rows = plan.real_rows(t.expert, t.block);
  }

  __device__ static __forceinline__ PlaceInRun place_in_run(const Rank&, const QueuedTask& t) {
    return {t.in_run, t.run};
  }

  __device__ static __forceinline__ void load(const Rank& rank, Shared& s, const QueuedTask& t, Loader& loader) {
    t.kind == TaskKind::gate_up ? GateUp::load(rank, s, t, loader) : Down::load(rank, s, t, loader);
  }

  // Both kinds have the same product, which is in the kernel once.
  __device__ static __forceinline__ void compute(const Rank& rank, Shared& s, const QueuedTask& t, const Product& p,
                                                 Math& math) {
    if (!math.has_rows(p)) {
      math.pass_steps(s, p.steps, p.shared_steps());
      return math.stage_nothing(s);
    }
    const GateUp::Known known = GateUp::begin(rank, t);
    Accumulators acc;
    math.multiply<Layout::activations_weights>(acc, s, p);
    if (p.kind == TaskKind::down) return Down::epilogue(acc, s, math);
    GateUp::epilogue(acc, known, rank, s, t, math);
  }

  __device__ static __forceinline__ void store(const Rank& rank, Shared& s, const DeviceRows& arena,
                                               const QueuedTask& t, StoreSide& side) {
    t.kind == TaskKind::down ? Down::store(rank, s, arena, t, side) : GateUp::store(rank, s, t, side);
  }

  __device__ static void spoil(const Rank& rank) { fill_nan(rank.out, rank.shape.tokens * rank.shape.hidden_size); }
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
  // With less depth the down tiles of a band are done before tokens are reduced over the one before; then more than
  // two bands only cost the cache's locality.
  return count_tiles(s, kTileColumns, kGateUpColumns, s.intermediate_size >= 2048 ? kColumnBands : 2);
}

}  // namespace mok::cuda::sm90
