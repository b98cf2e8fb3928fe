// What outlives calls: the loaded kernels of every device, its state, and the words in which it reports that a call has
// failed.
#pragma once

#include <map>
#include <mutex>
#include <optional>
#include <string>

#include "cuda/runtime/backend.h"

namespace mok::cuda {

struct Device {
  std::mutex mutex;  // of what is below, and of the launches of one call, which follow each other on their stream
  const Backend* backend = nullptr;
  int32_t multiprocessors = 0;
  std::map<const void*, int> shared_bytes;  // of each kernel that is loaded, what it may use
  DeviceState* state = nullptr;             // device memory
  Failure* failure = nullptr;               // mapped host memory: the device writes, the host reads
  Error error;                              // why it cannot be used
};

// Never destroyed, as the CUDA context may go first.
class Runtime {
 public:
  static Runtime& instance();

  Device& device(int id);  // by CUDA's number
  // Calls visit(id, device) for each that has been used.
  template <class Visit>
  void for_each_device(const Visit& visit) {
    const std::lock_guard lock(mutex_);
    for (auto& [id, device] : devices_) visit(id, device);
  }

 private:
  std::mutex mutex_;  // of the map: devices stay where they are
  std::map<int, Device> devices_;
};

// Makes what launches need on the current device: its state, and every kernel loaded. May allocate and synchronise;
// must have run once before a launch, which returns the error if there was one: XLA ends the process if one of several
// devices fails before a call is executed.
void prepare(const Shape& shape);

}  // namespace mok::cuda
