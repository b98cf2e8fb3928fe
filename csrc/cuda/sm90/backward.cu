// The backward megakernel on Hopper: gate_up tiles where the forward's pre-activations are not kept; hidden_grad,
// row_grad and weight_grad. row_grad is one accumulation over gate and up, its rows straight to their slots.
#include "cuda/sm90/gate_up.cuh"
#include "cuda/sm90/hidden_grad.cuh"
#include "cuda/sm90/megakernel.cuh"
#include "cuda/sm90/weight_grad.cuh"

namespace mok::cuda::sm90 {
namespace {

struct Backward {
  using Rank = BackwardRank;

  __device__ static __forceinline__ void look_up(const Rank& rank, const Plan& plan, QueuedTask& t) {
    if (t.kind == TaskKind::weight_grad) return WeightGrad::look_up(plan, t);
    t.real_rows = plan.real_rows(t.expert, t.block);
    t.steps = steps_of(t.kind == TaskKind::row_grad ? rank.shape.intermediate : rank.shape.hidden);
    if (t.kind == TaskKind::row_grad) t.steps *= 2;
    if (t.kind == TaskKind::hidden_grad) t.chunks = HiddenGrad::chunks(rank.shape, t.part);
  }

  __device__ static __forceinline__ PlaceInRun place_in_run(const Rank& rank, const QueuedTask& t) {
    return t.kind == TaskKind::weight_grad ? WeightGrad::place_in_run(rank, t) : PlaceInRun{t.in_run, t.run};
  }

  // ---- Loads.

  __device__ static __forceinline__ void load(const Rank& rank, Shared& s, const QueuedTask& t, Loader& loader) {
    switch (t.kind) {
      case TaskKind::gate_up:
        return load_gate_up(rank, s, t, loader);
      case TaskKind::hidden_grad:
        return HiddenGrad::load(rank, s, t, loader);
      case TaskKind::row_grad:
        return load_row_grad(rank, s, t, loader);
      default:
        return WeightGrad::load(rank, s, t, loader);
    }
  }

  __device__ static __forceinline__ void load_row_grad(const Rank& rank, Shared& s, const QueuedTask& t,
                                                       Loader& loader) {
    const int32_t count = t.steps / 2, row = t.ring_row, column = t.part * kTileColumns, expert = t.expert;
    for (int32_t which = 0; which < 2; ++which) {
      const CUtensorMap* weights = which ? &rank.wi_1_128 : &rank.wi_0_128;
      for (int32_t step = 0; step < count; ++step) {
        const int32_t k = step * kStepDepth;
        load_step_k_major(s.tiles, loader, weights, k, column, expert, [&](uint8_t* to, uint64_t* full) {
          tensor_load_3d(to, &rank.gate_up_grads_128, k, which, row, full);
        });
      }
    }
  }

  // ---- Math.

  __device__ static __forceinline__ void compute(const Rank& rank, Shared& s, const QueuedTask& t, const Product& p,
                                                 Math& math) {
    Accumulators acc;
    if (p.kind == TaskKind::weight_grad) return WeightGrad::compute(acc, rank, s, t, p, math);
    if (!math.has_rows(p)) return pass(s, p, math);
    if (p.kind == TaskKind::hidden_grad) return HiddenGrad::compute(acc, rank, s, t, p, math);
    if (p.kind == TaskKind::row_grad) {
      math.multiply<Layout::activations_weights_k>(acc, s, p);
      return math.stage_rows(acc, s);
    }
    math.multiply<Layout::activations_weights>(acc, s, p);
    store_pre_activations(acc, pre_activation_tile(rank.pre_activations, rank, t.ring_row, t.part));
    math.stage_nothing(s);
  }
  __device__ static __forceinline__ void pass(Shared& s, const Product& p, Math& math) {
    math.pass_steps(s, p.steps, p.shared_steps());
    for (int32_t i = 0; i < p.chunks; ++i) {
      math.pass_stage(s, [&] { mbarrier_arrive(math.stages.chunk_full(s.tiles)); });
    }
    if (p.kind != TaskKind::hidden_grad) math.stage_nothing(s);
  }

  // ---- Stores.

  __device__ static __forceinline__ void store(const Rank& rank, Shared& s, const DeviceArena& arena,
                                               const QueuedTask& t, StoreSide& side) {
    switch (t.kind) {
      case TaskKind::gate_up:
        return store_nothing(s, side);
      case TaskKind::hidden_grad:
        if (lane_index() == 0) HiddenGrad::store(rank, s, t, side);
        return;
      case TaskKind::row_grad:
        push_rows(rank, arena, t, s, side);
        if (t.part == 0) push_router_grads(rank, arena, t);
        return;
      default:
        return WeightGrad::store(rank, s, t, side);
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
      rank.in_arena<float>(to.rank, arena.at(arena.layout.router_grads))[to.slot] = sum;
    }
  }

  __device__ static void spoil(const Rank& rank) {
    const Shape& s = rank.shape;
    const int64_t weights = s.local_experts * s.hidden * s.intermediate;
    fill_nan(rank.out, s.tokens * s.hidden);
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
