// Instantiates the algorithm of csrc/moe for devices: one thread writes the rank's row table, its macrobatches, and
// every task of both lists of both directions. The GPU executor's debug kernel; results must equal the host's.
#include "moe/arena.h"
#include "moe/backward.h"
#include "moe/forward.h"

namespace mok::cuda {

// ids [ranks, slots], clean. Outputs as in row_table.h and ring.h; `next` is scratch [local_experts].
__global__ void build_rows(Shape shape, const int32_t* ids, int32_t* expert_rows, int32_t* expert_block, int64_t* next,
                           RowSource* rows, int32_t* macro_block, int32_t* macrobatches) {
  const auto id_of = [&](int64_t rank, int64_t slot) { return ids[rank * shape.slots() + slot]; };
  count_rows(shape, id_of, expert_rows, expert_block);
  fill_row_table(shape, id_of, expert_rows, expert_block, next, rows);
  *macrobatches = cut_macrobatches(expert_block, static_cast<int32_t>(shape.local_experts),
                                   static_cast<int32_t>(shape.ring_rows / kRowBlock), macro_block);
}

// Writes the tasks of one list and their number; `segments` is scratch [max_segments].
__global__ void list_tasks(Direction direction, bool communication, Plan plan, Segment* segments, Task* tasks,
                           int64_t* count) {
  TaskList list{segments};
  if (direction == Direction::forward) {
    communication ? forward_communication(plan, list) : forward_compute(plan, list);
  } else {
    communication ? backward_communication(plan, list) : backward_compute(plan, list);
  }
  __shared__ Task task;  // its arrays are indexed at run time: not for registers
  for (int64_t ticket = 0; ticket < list.tasks; ++ticket) {
    direction == Direction::forward ? write_forward_task(plan, list, ticket, task)
                                    : write_backward_task(plan, list, ticket, task);
    tasks[ticket] = task;
  }
  *count = list.tasks;
}

}  // namespace mok::cuda
