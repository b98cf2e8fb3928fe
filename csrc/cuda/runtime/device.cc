#include "cuda/runtime/device.h"

#include "cuda/schedule.h"

namespace mok::cuda {
namespace {

Error look_up(Device& device, int id) {
  int major, minor;
  MOK_CUDA_TRY(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, id));
  MOK_CUDA_TRY(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, id));
  MOK_CUDA_TRY(cudaDeviceGetAttribute(&device.multiprocessors, cudaDevAttrMultiProcessorCount, id));
  device.backend = find_backend(major, minor);
  if (device.backend) return std::nullopt;
  return "no kernel for compute capability " + std::to_string(major) + "." + std::to_string(minor) + " yet, only for " +
         backend_names() + "; use implementation=\"xla\"";
}

// Does nothing if the kernel is loaded and may use that much shared memory. To ask for its attributes loads it.
Error load_kernel(Device& device, const void* kernel, int shared_bytes) {
  const auto loaded = device.shared_bytes.find(kernel);
  if (loaded != device.shared_bytes.end() && shared_bytes <= loaded->second) return std::nullopt;
  MOK_CUDA_TRY(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes));
  cudaFuncAttributes attributes;
  MOK_CUDA_TRY(cudaFuncGetAttributes(&attributes, kernel));
  device.shared_bytes[kernel] = shared_bytes;
  return std::nullopt;
}

Error load_kernels(Device& device, const Shape& shape) {
  if (auto error = load_kernel(device, abort_kernel(), 0)) return error;
  for (const Direction direction : {Direction::forward, Direction::backward}) {
    const int64_t schedule_bytes = schedule_shared_bytes(direction, shape);
    if (auto error = load_kernel(device, schedule_kernel(direction), static_cast<int>(schedule_bytes))) return error;
    const Backend& backend = *device.backend;
    const int layer_bytes = static_cast<int>(backend.shared_bytes);
    if (auto error = load_kernel(device, backend.kernel(direction), layer_bytes)) return error;
  }
  return std::nullopt;
}

Error make_state(Device& device) {
  if (device.state) return std::nullopt;
  Failure* failure;
  MOK_CUDA_TRY(cudaHostAlloc(&failure, sizeof(Failure), cudaHostAllocMapped | cudaHostAllocPortable));
  *failure = {};
  DeviceState* state;
  MOK_CUDA_TRY(cudaMalloc(&state, sizeof(DeviceState)));
  MOK_CUDA_TRY(cudaMemset(state, 0, sizeof(DeviceState)));
  MOK_CUDA_TRY(cudaDeviceSynchronize());
  device.failure = failure;
  device.state = state;
  return std::nullopt;
}

Error make_ready(Device& device, int id, const Shape& shape) {
  if (auto error = look_up(device, id)) return error;
  if (auto error = make_state(device)) return error;
  return load_kernels(device, shape);
}

}  // namespace

Runtime& Runtime::instance() {
  static Runtime* runtime = new Runtime;
  return *runtime;
}

Device& Runtime::device(int id) {
  const std::lock_guard lock(mutex_);
  return devices_[id];
}

void prepare(const Shape& shape) {
  int id = -1;
  cudaGetDevice(&id);
  Device& device = Runtime::instance().device(id);
  const std::lock_guard lock(device.mutex);
  device.error = make_ready(device, id, shape);
}

}  // namespace mok::cuda
