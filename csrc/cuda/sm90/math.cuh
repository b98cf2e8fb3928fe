// Math warpgroups: how they come by their tasks, and what all of their products and epilogues have in common.
#pragma once

#include "cuda/sm90/fragments.cuh"
#include "cuda/sm90/queue.cuh"

namespace mok::cuda::sm90 {

// What a math thread keeps from task to task.
struct Math {
  Stages stages;
  Staging staging;
  Turn<kQueue> turn;
  bool knows_next = false;  // look_ahead has seen the next task
  Product next;

  __device__ __forceinline__ Product take(Shared& s) {
    if (!knows_next) {
      mbarrier_wait(&s.queue_full[turn.place()], turn.parity());
      next = s.queue[turn.place()].product();
    }
    knows_next = false;
    return next;
  }
  __device__ __forceinline__ void finish(Shared& s) {
    give_back_task(s, turn.place());
    turn.advance();
  }
  // While the last step of a product runs, a task waits for the staging area, which its epilogue then need not do; and
  // it sees what comes next, if that is known, so that nothing but the epilogue is between two products.
  __device__ __forceinline__ void look_ahead(Shared& s) {
    staging.acquire(s.tiles);
    Turn<kQueue> after = turn;
    after.advance();
    knows_next = mbarrier_test(&s.queue_full[after.place()], after.parity());
    if (knows_next) next = s.queue[after.place()].product();
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
    return thread_index() / 128 * kWarpgroupRows < p.real_rows;
  }
  __device__ __forceinline__ void pass_steps(Shared& s, int32_t steps, int32_t shared_steps) {
    for (int32_t step = 0; step < steps; ++step) {
      pass_stage(s, [&] { give_back(s.tiles, stages.place(), step, shared_steps); });
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
    for_each_fragment(acc, [&](int32_t i, const float* values) { Staging::write_row(address, i, values); });
    staging.release(s.tiles);
  }
  // This thread's place in its warpgroup's staging area, for vectors of 16 bytes.
  __device__ __forceinline__ uint32_t park_address(Shared& s) {
    return shared_address(s.tiles.staging[thread_index() / 128]) + thread_index() % 128 * 16;
  }
  // Until all threads of this warpgroup are here.
  __device__ __forceinline__ void meet_warpgroup() { named_barrier(kWarpgroupBarrier + thread_index() / 128, 128); }
  // Nothing is staged; the store warp learns that this warpgroup's own stores are issued, and signals.
  __device__ __forceinline__ void stage_nothing(Shared& s) {
    Fences::before_release();
    staging.acquire(s.tiles);
    staging.release(s.tiles);
  }
};

}  // namespace mok::cuda::sm90
