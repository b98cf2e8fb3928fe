#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

#include "cuda/test/algorithm.h"
#include "moe/arena.h"
#include "moe/lists.h"

namespace mok::cuda::test {
namespace {

// What a rank's tables are written to.
struct Tables {
  int32_t* clean;         // [ranks, slots]
  uint8_t* bad;           // [tokens]
  int32_t* expert_rows;   // [local_experts]
  int32_t* expert_block;  // [local_experts + 1]
  int64_t* next;          // [local_experts], scratch
  RowSource* rows;        // [max_rows]
  int32_t* macro_block;   // [max_macrobatches + 1]
  Plan* plan;
  int32_t* bad_tokens;
};

// One thread. The rank's own tokens are cleaned last, so that `bad` is theirs.
__global__ void make_tables(Shape shape, Save save, TileCounts tiles, const int32_t* ids, Tables t) {
  for (int64_t i = 1; i <= shape.ranks; ++i) {
    const int64_t first = (shape.rank + i) % shape.ranks * shape.slots();
    *t.bad_tokens = clean_expert_ids(shape, ids + first, t.clean + first, t.bad);
  }
  const auto id_of = [&](int64_t rank, int64_t slot) { return t.clean[rank * shape.slots() + slot]; };
  count_rows(shape, id_of, t.expert_rows, t.expert_block);
  fill_row_table(shape, id_of, t.expert_rows, t.expert_block, t.next, t.rows);
  int32_t valid_slots = 0;
  for (int64_t slot = 0; slot < shape.slots(); ++slot) valid_slots += id_of(shape.rank, slot) >= 0;
  make_plan(shape, tiles, save, valid_slots, t.expert_rows, t.expert_block, t.macro_block, *t.plan);
}

// One thread. Segments are in place already, as lists are copied around with their pointers.
__global__ void make_lists(Direction direction, const Plan* plan, TaskList* communication, TaskList* compute) {
  fill_lists(direction, *plan, *communication, *compute);
}

// Any number of threads: task(ticket) is a pure function.
__global__ void list_tasks(Direction direction, const Plan* plan, const TaskList* list, Task* tasks) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t ticket = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; ticket < list->tasks; ticket += step) {
    write_task(direction, *plan, list->segment_of(ticket), ticket, tasks[ticket]);
  }
}

void check(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}

template <class T>
class Array {
 public:
  explicit Array(int64_t size) { check(cudaMalloc(&data_, (size + 1) * sizeof(T))); }  // none is empty
  explicit Array(const std::vector<T>& values) : Array(static_cast<int64_t>(values.size())) {
    check(cudaMemcpy(data_, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
  }
  Array(const Array&) = delete;
  ~Array() { cudaFree(data_); }

  T* data() const { return data_; }
  std::vector<T> host(int64_t size) const {
    std::vector<T> values(size);
    check(cudaMemcpy(values.data(), data_, size * sizeof(T), cudaMemcpyDeviceToHost));
    return values;
  }

 private:
  T* data_ = nullptr;
};

std::vector<Task> tasks_of(Direction direction, const Plan* plan, const Array<TaskList>& list) {
  const int64_t count = list.host(1)[0].tasks;
  const Array<Task> tasks(count);
  list_tasks<<<32, 128>>>(direction, plan, list.data(), tasks.data());
  check(cudaGetLastError());
  return tasks.host(count);
}

}  // namespace

DeviceProgram make_on_device(Direction direction, Save save, const Shape& s, const TileCounts& tiles,
                             const std::vector<int32_t>& ids) {
  const Array<int32_t> given(ids), clean(s.ranks * s.slots()), expert_rows(s.local_experts);
  const Array<int32_t> expert_block(s.local_experts + 1), macro_block(max_macrobatches(s) + 1), bad_tokens(1);
  const Array<uint8_t> bad(s.tokens);
  const Array<int64_t> next(s.local_experts);
  const Array<RowSource> rows(max_rows(s));
  const Array<Plan> plan(1);
  make_tables<<<1, 1>>>(s, save, tiles, given.data(),
                        {clean.data(), bad.data(), expert_rows.data(), expert_block.data(), next.data(), rows.data(),
                         macro_block.data(), plan.data(), bad_tokens.data()});
  check(cudaGetLastError());
  const Array<Segment> communication_segments(max_segments(s)), compute_segments(max_segments(s));
  const Array<TaskList> communication(std::vector<TaskList>{{communication_segments.data()}});
  const Array<TaskList> compute(std::vector<TaskList>{{compute_segments.data()}});
  make_lists<<<1, 1>>>(direction, plan.data(), communication.data(), compute.data());
  check(cudaGetLastError());

  DeviceProgram program{};
  program.clean = clean.host(s.ranks * s.slots());
  program.bad = bad.host(s.tokens);
  program.bad_tokens = bad_tokens.host(1)[0];
  program.expert_rows = expert_rows.host(s.local_experts);
  program.expert_block = expert_block.host(s.local_experts + 1);
  program.plan = plan.host(1)[0];
  program.macro_block = macro_block.host(program.plan.macrobatches + 1);
  program.rows = rows.host(program.expert_block.back() * kRowBlock);
  program.communication = tasks_of(direction, plan.data(), communication);
  program.compute = tasks_of(direction, plan.data(), compute);
  program.plan.expert_rows = program.plan.expert_block = program.plan.macro_block = nullptr;
  return program;
}

}  // namespace mok::cuda::test
