#include "cuda/runtime/device.h"

#include <utility>
#include <vector>

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
  for (const Direction direction : {Direction::forward, Direction::backward}) {
    const int64_t schedule_bytes = schedule_shared_bytes(direction, shape);
    if (auto error = load_kernel(device, schedule_kernel(direction), static_cast<int>(schedule_bytes))) return error;
    const Backend& backend = *device.backend;
    const int layer_bytes = static_cast<int>(backend.shared_bytes);
    if (auto error = load_kernel(device, backend.kernel(direction), layer_bytes)) return error;
  }
  return std::nullopt;
}

// Of all ranks in one piece of memory, that of the first one first. Only the headers must be zero.
Error make_arenas(Arenas& arenas, const Shape& shape, int32_t ranks_here) {
  const int64_t bytes = allocated_arena_bytes(shape);
  if (bytes <= arenas.bytes) return std::nullopt;
  uint8_t* first;
  MOK_CUDA_TRY(cudaMalloc(&first, bytes * ranks_here));
  std::vector<uint8_t*> table(ranks_here);
  for (int32_t r = 0; r < ranks_here; ++r) {
    table[r] = first + r * bytes;
    MOK_CUDA_TRY(cudaMemset(table[r], 0, kHeaderBytes));
  }
  MOK_CUDA_TRY(cudaMalloc(&arenas.table, ranks_here * sizeof(uint8_t*)));
  MOK_CUDA_TRY(cudaMemcpy(arenas.table, table.data(), ranks_here * sizeof(uint8_t*), cudaMemcpyHostToDevice));
  MOK_CUDA_TRY(cudaDeviceSynchronize());
  arenas.bytes = bytes;
  arenas.first = first;
  return std::nullopt;
}

Error make_host_failure(Runtime& runtime) {
  if (runtime.host_failure) return std::nullopt;
  Failure* failure;
  MOK_CUDA_TRY(cudaHostAlloc(&failure, sizeof(Failure), cudaHostAllocMapped | cudaHostAllocPortable));
  *failure = {};
  runtime.host_failure = failure;
  return std::nullopt;
}

}  // namespace

Runtime& Runtime::instance() {
  static Runtime* runtime = new Runtime;
  return *runtime;
}

Error prepare(const Shape& shape, int32_t ranks_here) {
  Runtime& runtime = Runtime::instance();
  const std::lock_guard lock(runtime.mutex);
  int id;
  MOK_CUDA_TRY(cudaGetDevice(&id));
  if (auto error = make_host_failure(runtime)) return error;
  Device& device = runtime.devices[id];
  if (auto error = look_up(device, id)) return error;
  if (auto error = load_kernels(device, shape)) return error;
  return make_arenas(device.arenas[ranks_here], shape, ranks_here);
}

}  // namespace mok::cuda
