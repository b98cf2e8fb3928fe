// What devices tell the host of calls that are over.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace mok::cuda {

// Calls that the current device has completed, of virtual ranks each one, and the clock cycles of all CTAs of their
// layer kernels. Waits for the device, so not while a graph is captured.
struct Cycles {
  int64_t calls, cycles;
};
Cycles cycles();

// What a device has reported of an earlier call, if any has. Reads host memory only.
std::optional<std::string> failure_text();

// How many devices of the process have run calls, or are about to.
int32_t devices_in_use();

}  // namespace mok::cuda
