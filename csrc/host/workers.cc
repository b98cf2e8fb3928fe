#include "host/workers.h"

#include <random>
#include <thread>

#include "host/timeline.h"

namespace mok::host {
namespace {

// Scratch of workers between calls; a call's threads are new each time. Never destroyed, as threads may outlive it.
class MatmulPool {
 public:
  static MatmulPool& instance() {
    static MatmulPool* pool = new MatmulPool;
    return *pool;
  }
  std::unique_ptr<TileMatmul> take() {
    const std::lock_guard lock(mutex_);
    if (free_.empty()) return std::make_unique<TileMatmul>();
    auto matmul = std::move(free_.back());
    free_.pop_back();
    return matmul;
  }
  void give_back(std::unique_ptr<TileMatmul> matmul) {
    const std::lock_guard lock(mutex_);
    free_.push_back(std::move(matmul));
  }

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<TileMatmul>> free_;
};

}  // namespace

Workers::Workers(Direction direction, const Plan& plan, const TaskLists& lists, const RowSource* row_table,
                 GroupCall& group, const Options& options, RunTask run_task)
    : direction_(direction),
      plan_(plan),
      lists_(lists),
      row_table_(row_table),
      group_(group),
      options_(options),
      run_task_(std::move(run_task)),
      map_(plan),
      counters_(map_.size()),
      communication_{lists.communication()},
      compute_{lists.compute()} {}

void Workers::run() {
  std::vector<std::thread> threads;
  int32_t worker = 0;
  for (int32_t i = 0; i < options_.communication_workers; ++i) {
    threads.emplace_back([this, id = worker++] { work(communication_, id); });
  }
  for (int32_t i = 1; i < options_.compute_workers; ++i) {
    threads.emplace_back([this, id = worker++] { work(compute_, id); });
  }
  work(compute_, worker);
  for (std::thread& thread : threads) thread.join();
}

void Workers::work(Queue& queue, int32_t worker) {
  std::minstd_rand random(static_cast<uint32_t>(options_.delay_seed * 7919 + plan_.rank * 131 + worker));
  auto matmul = MatmulPool::instance().take();
  WorkerTimeline timeline(
      {.direction = direction_, .rank = plan_.rank, .worker = worker, .communicates = &queue == &communication_});
  // Relaxed: claiming a ticket orders nothing, and the thread sanitizer shall not believe that it does.
  for (int64_t ticket; (ticket = queue.next.fetch_add(1, std::memory_order_relaxed)) < queue.list.tasks;) {
    const Task task = lists_.task(queue.list, ticket);
    if (options_.delay_seed) std::this_thread::sleep_for(std::chrono::microseconds(random() % 100));
    timeline.begin(task);
    if (!wait_for(task)) break;
    timeline.ready();
    run_task_(task, *matmul);
    signal(task);
    timeline.end();
  }
  MatmulPool::instance().give_back(std::move(matmul));
}

int32_t Workers::value(int32_t counter) const {
  const int32_t band = counter - map_.arrived(0);
  return band < 0 ? counters_[counter].load() : group_.arrived(plan_.rank, band);
}

bool Workers::wait_for(const Task& task) {
  const auto ready = [&] {
    for (int32_t i = 0; i < task.wait_count; ++i) {
      if (value(task.waits[i].counter) < task.waits[i].target) return false;
    }
    return true;
  };
  if (group_.cancelled()) return false;
  if (group_.wait(plan_.rank, options_.timeout_s, ready)) return true;
  group_.cancel("rank " + std::to_string(plan_.rank) +
                " waited longer than timeout_s = " + std::to_string(options_.timeout_s) + " s " + describe(task));
  return false;
}

void Workers::signal(const Task& task) {
  if (task.kind == TaskKind::notify) return notify_sources(task);
  for (int32_t i = 0; i < task.signal_count; ++i) ++counters_[task.signals[i]];
  if (task.signal_count) group_.wake(plan_.rank);
}

// Rows of an expert are ordered by source, so each source of the block is one run of rows.
void Workers::notify_sources(const Task& task) {
  const RowSource* rows = row_table_ + task.block * kRowBlock;
  const int32_t count = plan_.real_rows(task.expert, task.block);
  for (int32_t begin = 0, end; begin < count; begin = end) {
    for (end = begin + 1; end < count && rows[end].rank == rows[begin].rank;) ++end;
    group_.add_arrived(rows[begin].rank, task.part, end - begin);
  }
}

std::string Workers::describe(const Task& task) const {
  std::string text = "before task " + std::string(kTaskNames[static_cast<int>(task.kind)]) + " of block " +
                     std::to_string(task.block) + " for";
  for (int32_t i = 0; i < task.wait_count; ++i) {
    const Wait& wait = task.waits[i];
    text += " counter " + std::to_string(wait.counter) + " at " + std::to_string(value(wait.counter)) + " of " +
            std::to_string(wait.target);
  }
  return text;
}

}  // namespace mok::host
