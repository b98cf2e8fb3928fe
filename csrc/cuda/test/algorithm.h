// The algorithm of csrc/moe as a device runs it: row table, macrobatches, and every task of a rank's lists. For tests,
// which compare it with what the host makes of the same.
#pragma once

#include <cstdint>
#include <vector>

#include "moe/program.h"

namespace mok::cuda::test {

// Of one rank.
struct DeviceProgram {
  std::vector<int32_t> clean;  // [ranks, slots], expert ids of all ranks
  std::vector<uint8_t> bad;    // [tokens], of its own
  int32_t bad_tokens;
  std::vector<int32_t> expert_rows, expert_block, macro_block;
  std::vector<RowSource> rows;
  Plan plan;  // its pointers are null
  std::vector<Task> communication, compute;
};

// `ids` are of all ranks, as users give them: [ranks, tokens, top_k]. Throws std::runtime_error if the device fails.
DeviceProgram make_on_device(Direction direction, Save save, const Shape& shape, const TileCounts& tiles,
                             const std::vector<int32_t>& ids);

}  // namespace mok::cuda::test
