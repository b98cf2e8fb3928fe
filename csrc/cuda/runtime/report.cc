#include "cuda/runtime/report.h"

#include "cuda/runtime/device.h"

namespace mok::cuda {
namespace {

// A device may be writing it.
FailureCode code_of(const Failure& failure) {
  return static_cast<FailureCode>(*static_cast<const volatile int32_t*>(&failure.code));
}

std::string describe(const Failure& failure) {
  const std::string rank = "rank " + std::to_string(failure.rank), peer = "rank " + std::to_string(failure.counter);
  switch (code_of(failure)) {
    case FailureCode::entry_timeout:
      return rank + " waited longer than entry_timeout_s for " + peer + " to start call " +
             std::to_string(failure.target) + ", which is in call " + std::to_string(failure.value);
    case FailureCode::cancelled:
      return rank + " ended a call early because " + peer + " had failed; its process tells why";
    case FailureCode::disagreement:
      return rank + " and " + peer + " are in different calls, or in calls of different shapes";
    case FailureCode::concurrent:
      return rank +
             " was in two calls of one expert-parallel group at the same time: leave "
             "xla_gpu_command_buffer_scheduling_mode as it is, or compute an operand of one from a result of the other";
    case FailureCode::aborted:
      return rank + " could not launch a call; the host's error says why";
    case FailureCode::misplaced:
      return rank + " of its group is number " + std::to_string(failure.counter) +
             " along the mesh's expert axes: make the mesh of jax.devices() in their order "
             "(mok_jax.sharding.make_mesh)";
    default:
      break;
  }
  const std::string waited = rank + " waited longer than timeout_s ";
  if (failure.task < 0) return waited + "for the CTAs that make its schedule";
  return waited + "before a " + kTaskNames[failure.task] + " task for counter " + std::to_string(failure.counter) +
         " to be " + std::to_string(failure.target) + ": it is " + std::to_string(failure.value);
}

}  // namespace

Cycles cycles() {
  int id;
  if (cudaGetDevice(&id) != cudaSuccess) return {};
  const DeviceState* there = Runtime::instance().device(id).state;
  DeviceState state{};
  if (!there || cudaDeviceSynchronize() != cudaSuccess) return {};
  if (cudaMemcpy(&state, there, sizeof(state), cudaMemcpyDeviceToHost) != cudaSuccess) return {};
  return {state.calls, state.cycles};
}

int32_t devices_in_use() {
  int32_t count = 0;
  Runtime::instance().for_each_device([&](int, const Device&) { ++count; });
  return count;
}

std::optional<std::string> failure_text() {
  std::optional<std::string> text;
  Runtime::instance().for_each_device([&](int id, const Device& device) {
    if (text || !device.failure || code_of(*device.failure) == FailureCode::none) return;
    text = "GPU " + std::to_string(id) + ", " + describe(*device.failure) + "; restart the process";
  });
  return text;
}

}  // namespace mok::cuda
