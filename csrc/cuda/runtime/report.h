// What devices tell the host of calls that are over.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace mok::cuda {

// Calls of one rank alone that the current device has completed, and the clock cycles of all CTAs of their layer
// kernels. Waits for the device, so not while a graph is captured; begins anew when a bigger arena is made.
struct Cycles {
  int64_t calls, cycles;
};
Cycles cycles();

// What a device has reported of an earlier call, if anything. Reads host memory only.
std::optional<std::string> failure_text();

}  // namespace mok::cuda
