// The scheduler: one lane. Tasks that it has got wait in order; only their loads wait for them.
#pragma once

#include "cuda/sm90/work.cuh"

namespace mok::cuda::sm90 {

template <Work W>
class Scheduler {
 public:
  using Rank = typename W::Rank;

  __device__ __forceinline__ Scheduler(const Rank& rank, Shared& s, const Roles& roles)
      : rank_(rank),
        s_(s),
        map_(s.schedule.plan),
        counters_(rank.template in_workspace<int32_t>(WorkspaceLayout(rank.shape).counters)),
        roles_(roles) {}

  __device__ __forceinline__ void run() {
    for (Turn<kQueue> turn;; turn.advance()) {
      mbarrier_wait(&s_.queue_empty[turn.place()], turn.parity() ^ 1);
      QueuedTask& task = s_.queue[turn.place()];
      next(task);
      task.Product::kind = task.kind;
      mbarrier_arrive(&s_.queue_full[turn.place()]);
      if (task.kind == kStop) return;
    }
  }

 private:
  // After a failure only what is shared, since the other CTA relies on its loads. Such a task has waited for nothing
  // and signals nothing; it has no rows, so nothing of it leaves the CTA but a weight gradient, finished or not:
  // results are made NaN later.
  __device__ __forceinline__ void next(QueuedTask& task) {
    do {
      const int64_t ticket = get_ticket();
      if (ticket >= s_.schedule.compute.tasks) {
        task.kind = kStop;
        return;
      }
      if (ticket < piece_end_) {
        task = *last_;
        task.part += static_cast<int32_t>(ticket - last_ticket_);
      } else {
        write(ticket, task);
        failed_ = failed_ || !wait_for_task(rank_, map_, counters_, task);
      }
      last_ = &task;
      last_ticket_ = ticket;
      share(task);
    } while (failed_ && !task.shared);
    if (failed_) task.real_rows = task.signal_count = 0;
    stage_ = (stage_ + task.left_out + task.steps + task.chunks) % kStages;
  }
  // To search the plan and to wait takes longer than a short product, so it is not done for a tile of the last task's
  // piece.
  __device__ __forceinline__ void write(int64_t ticket, QueuedTask& task) {
    const Plan& plan = s_.schedule.plan;
    if (!segment_.holds(ticket)) segment_ = s_.schedule.compute.segment_of(ticket);
    write_task<Rank::kDirection>(plan, segment_, ticket, task);
    task.ring_row = plan.ring_block(task.block) * kBlockRows;
    task.chunks = 0;
    W::look_up(rank_, plan, task);
    piece_end_ = task.kind == TaskKind::weight_grad ? ticket - task.part + rank_.tiles.weight_grad : 0;
  }
  __device__ __forceinline__ int64_t get_ticket() {
    if (cluster_rank() != roles_.first) return s_.mailbox.receive(mail_);
    const int64_t ticket = add(rank_.header().compute_ticket, roles_.count);
    if (roles_.count > 1) s_.mailbox.send(mail_, ticket + 1);
    return ticket;
  }
  // Neighbours in a run share. Their stages must be the same ones: both begin at the first, and go on alike.
  __device__ __forceinline__ void share(QueuedTask& task) {
    const PlaceInRun at = W::place_in_run(rank_, task);
    task.shared = roles_.count > 1 && (cluster_rank() == 0 ? at.index + 1 < at.size : at.index > 0);
    task.left_out = task.shared && !aligned_ ? (kStages - stage_) % kStages : 0;
    aligned_ = task.shared;
  }

  const Rank& rank_;
  Shared& s_;
  const CounterMap map_;
  const int32_t* counters_;
  const Roles roles_;
  Turn<Mailbox::kPlaces> mail_;
  Segment segment_{};  // of the last task that was written
  const QueuedTask* last_ = nullptr;
  int64_t last_ticket_ = 0, piece_end_ = 0;  // the last task's; before which all differ from it in their part only
  int32_t stage_ = 0;                        // at which the next task begins
  bool aligned_ = false;                     // in both CTAs it is the same
  bool failed_ = false;
};

}  // namespace mok::cuda::sm90
