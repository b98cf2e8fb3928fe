// The backward megakernel on Hopper, of four kinds of tiles: gate_up where the forward's pre-activations are not kept,
// hidden_grad, row_grad and weight_grad.
#include "cuda/sm90/gate_up.cuh"
#include "cuda/sm90/hidden_grad.cuh"
#include "cuda/sm90/kernels.h"
#include "cuda/sm90/megakernel.cuh"
#include "cuda/sm90/row_grad.cuh"
#include "cuda/sm90/weight_grad.cuh"

namespace mok::cuda::sm90 {
namespace {

struct Backward {
  using Rank = BackwardRank;

  __device__ static __forceinline__ void look_up(const Rank& rank, const Plan& plan, QueuedTask& t) {
    if (t.kind == TaskKind::weight_grad) return WeightGrad::look_up(plan, t);
    t.real_rows = plan.real_rows(t.expert, t.block);
    t.steps = steps_of(t.kind == TaskKind::row_grad ? RowGrad::depth(rank.shape) : HiddenGrad::depth(rank.shape));
    if (t.kind == TaskKind::row_grad) t.steps *= RowGrad::kProducts;
    if (t.kind == TaskKind::hidden_grad) t.chunks = HiddenGrad::chunks(rank.shape, t.part);
  }

  __device__ static __forceinline__ PlaceInRun place_in_run(const Rank& rank, const QueuedTask& t) {
    return t.kind == TaskKind::weight_grad ? WeightGrad::place_in_run(rank, t) : PlaceInRun{t.in_run, t.run};
  }

  __device__ static __forceinline__ void load(const Rank& rank, Shared& s, const QueuedTask& t, Loader& loader) {
    switch (t.kind) {
      case TaskKind::gate_up:
        return ReplayedGateUp::load(rank, s, t, loader);
      case TaskKind::hidden_grad:
        return HiddenGrad::load(rank, s, t, loader);
      case TaskKind::row_grad:
        return RowGrad::load(rank, s, t, loader);
      default:
        return WeightGrad::load(rank, s, t, loader);
    }
  }

  __device__ static __forceinline__ void compute(const Rank& rank, Shared& s, const QueuedTask& t, const Product& p,
                                                 Math& math) {
    Accumulators acc;
    if (p.kind == TaskKind::weight_grad) {
      const bool in_f32 = WeightGrad::begin(acc, rank, t, p);
      p.steps > 0 ? math.multiply<Layout::both_transposed>(acc, s, p, p.begun) : math.look_ahead(s);
      return WeightGrad::epilogue(acc, in_f32, rank, s, t, p, math);
    }
    if (!math.has_rows(p)) return pass(s, p, math);
    if (p.kind == TaskKind::hidden_grad) {
      HiddenGrad::Known known = HiddenGrad::begin(rank, p);
      math.multiply<Layout::activations_weights_k>(acc, s, p);
      return HiddenGrad::epilogue(acc, known, rank, s, t, math);
    }
    if (p.kind == TaskKind::row_grad) {
      math.multiply<Layout::activations_weights_k>(acc, s, p);
      return RowGrad::epilogue(acc, s, math);
    }
    math.multiply<Layout::activations_weights>(acc, s, p);
    ReplayedGateUp::epilogue(acc, rank, s, t, math);
  }
  __device__ static __forceinline__ void pass(Shared& s, const Product& p, Math& math) {
    math.pass_steps(s, p.steps, p.shared_steps());
    for (int32_t i = 0; i < p.chunks; ++i) {
      math.pass_stage(s, [&] { mbarrier_arrive(math.stages.chunk_full(s.tiles)); });
    }
    if (p.kind != TaskKind::hidden_grad) math.stage_nothing(s);
  }

  __device__ static __forceinline__ void store(const Rank& rank, Shared& s, const DeviceRows& arena,
                                               const QueuedTask& t, StoreSide& side) {
    switch (t.kind) {
      case TaskKind::gate_up:
        return ReplayedGateUp::store(rank, s, t, side);
      case TaskKind::hidden_grad:
        if (lane_index() == 0) HiddenGrad::store(rank, s, t, side);
        return;
      case TaskKind::row_grad:
        return RowGrad::store(rank, s, arena, t, side);
      default:
        return WeightGrad::store(rank, s, t, side);
    }
  }

  __device__ static void spoil(const Rank& rank) {
    const Shape& s = rank.shape;
    const int64_t weights = s.local_experts * s.hidden_size * s.intermediate_size;
    fill_nan(rank.out, s.tokens * s.hidden_size);
    fill_nan(rank.router_grads, s.slots());
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
