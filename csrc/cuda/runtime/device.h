// What outlives calls: the arenas and the loaded kernels of every device, and the words in which devices report that a
// call has failed.
#pragma once

#include <atomic>
#include <map>
#include <mutex>

#include "cuda/runtime/backend.h"

namespace mok::cuda {

// Arenas of the ranks of one device. Never freed: captured graphs hold their addresses.
struct Arenas {
  int64_t bytes = 0;  // of each
  uint8_t* first = nullptr;
  uint8_t** table = nullptr;  // device memory
};

struct Device {
  const Backend* backend = nullptr;
  int32_t multiprocessors = 0;
  std::map<const void*, int> shared_bytes;  // of each kernel that is loaded, what it may use
  std::map<int32_t, Arenas> arenas;         // by ranks_here
};

// Never destroyed, as the CUDA context may go first.
struct Runtime {
  std::mutex mutex;                              // of what is below, but for the failure
  std::map<int, Device> devices;                 // by CUDA's number
  std::atomic<Failure*> host_failure = nullptr;  // mapped: devices write, the host reads

  static Runtime& instance();
};

// Makes what launches need on the current device: arenas for this shape, and every kernel loaded. May allocate and
// synchronise; must have run once before a launch.
Error prepare(const Shape& shape, int32_t ranks_here);

}  // namespace mok::cuda
