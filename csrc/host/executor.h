// Runs one rank's part of a call on CPU threads: fills the arena, meets the other ranks, counts and tabulates rows, and
// has workers execute the task program. Blocks until the rank's results are complete.
#pragma once

#include <optional>
#include <string>

#include "host/group.h"
#include "host/tiles.h"

namespace mok::host {

struct Options {
  int32_t communication_workers = 1;
  int32_t compute_workers = 1;  // at least 1 of each
  uint64_t delay_seed = 0;      // not 0: every worker sleeps for random times before its tasks
  double entry_timeout_s = 30;
  double timeout_s = 30;
};

// What the routing of a call came to; results of the forward. The backward is given row_table and expert_rows.
struct Routing {
  RowSource* row_table;  // [max_rows]
  int32_t* expert_rows;  // [local_experts], without padding
  int32_t* bad_tokens;   // scalar, of this rank; null in the backward
};

template <class T>
struct Inputs {
  const T* x;                   // [T, H]
  const T* dy;                  // [T, H]; null in the forward
  const int32_t* expert_ids;    // [T, K]
  const float* expert_weights;  // [T, K]
};

// One rank's part of one call.
template <class T>
struct Call {
  Direction direction;
  Shape shape;
  Save save;
  GatedActivation activation;
  Inputs<T> inputs;
  Routing routing;
  Buffers<T> buffers;  // `arenas` and `row_table` are filled in by execute
};

// Returns what went wrong, or nothing.
template <class T>
std::optional<std::string> execute(Call<T> call, GroupCall& group, const Options& options);

}  // namespace mok::host
