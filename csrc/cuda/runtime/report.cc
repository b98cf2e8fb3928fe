#include "cuda/runtime/report.h"

#include "cuda/runtime/device.h"

namespace mok::cuda {
namespace {

// A device may be writing it.
FailureCode code_of(const Failure& failure) {
  return static_cast<FailureCode>(*static_cast<const volatile int32_t*>(&failure.code));
}

std::string describe(const Failure& failure) {
  const std::string rank = "rank " + std::to_string(failure.rank);
  if (code_of(failure) == FailureCode::entry_timeout) {
    return rank + " waited longer than entry_timeout_s for rank " + std::to_string(failure.counter) +
           " to start its call";
  }
  const std::string waited = rank + " waited longer than timeout_s ";
  if (failure.task < 0) return waited + "for the CTAs that make its schedule";
  return waited + "before a " + kTaskNames[failure.task] + " task for counter " + std::to_string(failure.counter);
}

// Of one rank alone on the current device; null: there is none. The lock is given back before anything waits for the
// device, as launches of others need it.
const uint8_t* lone_arena() {
  int id;
  if (cudaGetDevice(&id) != cudaSuccess) return nullptr;
  Runtime& runtime = Runtime::instance();
  const std::lock_guard lock(runtime.mutex);
  return runtime.devices[id].arenas[1].first;
}

}  // namespace

Cycles cycles() {
  const uint8_t* arena = lone_arena();
  ArenaHeader header{};
  if (!arena || cudaDeviceSynchronize() != cudaSuccess) return {};
  if (cudaMemcpy(&header, arena, sizeof(header), cudaMemcpyDeviceToHost) != cudaSuccess) return {};
  return {header.call, header.cycles};
}

std::optional<std::string> failure_text() {
  const Failure* failure = Runtime::instance().host_failure;
  if (!failure || code_of(*failure) == FailureCode::none) return std::nullopt;
  return describe(*failure) + "; restart the process";
}

}  // namespace mok::cuda
