// Threads that execute a rank's task lists: claim a ticket, wait for its counters, run, signal.
#pragma once

#include <functional>

#include "host/executor.h"
#include "moe/lists.h"

namespace mok::host {

class Workers {
 public:
  // `run_task` is called by many threads at once, each with its own TileMatmul.
  using RunTask = std::function<void(const Task&, TileMatmul&)>;

  Workers(Direction direction, const Plan& plan, const TaskLists& lists, const RowSource* row_table, GroupCall& group,
          const Options& options, RunTask run_task);

  // Until both lists are done, or the group's call is cancelled.
  void run();

 private:
  struct Queue {
    const TaskList& list;
    std::atomic<int64_t> next{0};
  };

  void work(Queue& queue, int32_t worker);
  bool wait_for(const Task& task);
  void signal(const Task& task);
  void notify_sources(const Task& task);
  int32_t value(int32_t counter) const;
  std::string describe(const Task& task) const;

  const Direction direction_;
  const Plan& plan_;
  const TaskLists& lists_;
  const RowSource* row_table_;
  GroupCall& group_;
  const Options& options_;
  RunTask run_task_;
  CounterMap map_;
  std::vector<std::atomic<int32_t>> counters_;
  Queue communication_, compute_;
};

}  // namespace mok::host
