// What a direction gives the skeleton: a type with these functions, all static. A kind of tile has as many of them as
// it needs, with the same names, in a file of its own: load and store as here; depth, or look_up; begin, which gets
// what an epilogue needs before the product, and epilogue, which gets the product in registers.
#pragma once

#include <concepts>

#include "cuda/sm90/math.cuh"

namespace mok::cuda::sm90 {

template <class W>
concept Work =
    requires(const typename W::Rank& rank, const Plan& plan, QueuedTask& found, const QueuedTask& task,
             const Product& product, Shared& s, const DeviceRows& arena, Loader& loader, Math& math, StoreSide& side) {
      requires std::derived_from<typename W::Rank, Rank>;  // the kernel's arguments
      // By the scheduler: fills in what a QueuedTask knows beyond its Task. Of weight_grad it must not look at the
      // part.
      { W::look_up(rank, plan, found) } -> std::same_as<void>;
      // By the scheduler: where it stands among neighbours with the same right operand and as many steps.
      { W::place_in_run(rank, task) } -> std::same_as<PlaceInRun>;
      // By one lane of the producer: loads the task's steps and chunks, a stage each, in order.
      { W::load(rank, s, task, loader) } -> std::same_as<void>;
      // By all math warps: takes as many stages as load fills, and fills and releases the staging area as often as
      // store acquires it, also where there are no rows.
      { W::compute(rank, s, task, product, math) } -> std::same_as<void>;
      // By the store warp: stores or pushes what is staged. The skeleton then waits for the stores, and signals.
      { W::store(rank, s, arena, task, side) } -> std::same_as<void>;
      // By one CTA, after a failure: makes every float result NaN.
      { W::spoil(rank) } -> std::same_as<void>;
    };

}  // namespace mok::cuda::sm90
