// Widths of the arrays between tasks that lie in whole tiles, in whatever order an executor likes. They are made before
// it is known which executor runs a call, so they are the same for all.
#pragma once

#include "moe/shape.h"

namespace mok {

inline constexpr int64_t kTileColumns = 256;  // of every product's tile; of gate_up, half are gate and half are up

// Elements of gate and up that a ring keeps of a row.
MOK_FN constexpr int64_t pre_activation_width(int64_t intermediate) { return round_up(2 * intermediate, kTileColumns); }

// Parts of the router gradient that a ring keeps of a row. There is one of each hidden_grad tile, and room for tiles of
// half the width.
MOK_FN constexpr int64_t router_parts_width(int64_t intermediate) { return ceil_div(intermediate, kTileColumns / 2); }

// Elements of one expert's gradients of wi_0, wi_1 and wo, which wait here while it straddles two macrobatches.
MOK_FN constexpr int64_t straddle_elements(int64_t hidden, int64_t intermediate) {
  const int64_t wi = round_up(hidden, kRowBlock) * round_up(intermediate, kTileColumns);
  const int64_t wo = round_up(intermediate, kRowBlock) * round_up(hidden, kTileColumns);
  return 2 * wi + wo;
}

}  // namespace mok
