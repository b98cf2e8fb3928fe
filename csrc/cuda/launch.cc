#include "cuda/launch.h"

#include <algorithm>
#include <bit>
#include <map>
#include <mutex>
#include <tuple>
#include <vector>

#include "cuda/kernels.h"

namespace mok::cuda {
namespace {

#define MOK_CUDA_TRY(call)                                                                              \
  if (const cudaError_t error = (call); error != cudaSuccess) {                                         \
    return std::string(#call) + " failed: " + cudaGetErrorName(error) + ", " + cudaGetErrorString(error); \
  }

// Arenas of the ranks of one device. Never freed: captured graphs hold their addresses.
struct Arenas {
  int64_t bytes = 0;           // of each
  uint8_t** table = nullptr;   // device memory
  Rank* many = nullptr;        // device memory, of virtual ranks
};

struct Device {
  int32_t multiprocessors = 0;
  bool loaded = false;
  std::map<int32_t, Arenas> arenas;  // by ranks_here
};

// Everything that outlives a call. Never destroyed, as the CUDA context may go first.
struct Memory {
  std::mutex mutex;
  std::map<int, Device> devices;
  Failure* host_failure = nullptr;  // mapped: devices write, the host reads

  static Memory& instance() {
    static Memory* memory = new Memory;
    return *memory;
  }
};

std::optional<std::string> load_kernels(Device& device, int id, const Shape& shape) {
  if (!device.loaded) {
    MOK_CUDA_TRY(cudaDeviceGetAttribute(&device.multiprocessors, cudaDevAttrMultiProcessorCount, id));
    MOK_CUDA_TRY(cudaFuncSetAttribute(sm90::forward_kernel(), cudaFuncAttributeMaxDynamicSharedMemorySize,
                                      static_cast<int>(sm90::forward_shared_bytes())));
    cudaFuncAttributes attributes;
    MOK_CUDA_TRY(cudaFuncGetAttributes(&attributes, sm90::forward_kernel()));
    MOK_CUDA_TRY(cudaFuncGetAttributes(&attributes, schedule_forward_kernel()));
    device.loaded = true;
  }
  MOK_CUDA_TRY(cudaFuncSetAttribute(schedule_forward_kernel(), cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(schedule_shared_bytes(shape))));
  return std::nullopt;
}

std::optional<std::string> make_arenas(Arenas& arenas, const Shape& shape, int32_t ranks_here) {
  const int64_t bytes = DeviceArena(shape).bytes;
  if (bytes <= arenas.bytes) return std::nullopt;
  const int64_t rounded = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(bytes)));
  uint8_t* base;
  MOK_CUDA_TRY(cudaMalloc(&base, rounded * ranks_here));
  std::vector<uint8_t*> table(ranks_here);
  for (int32_t r = 0; r < ranks_here; ++r) {
    table[r] = base + r * rounded;
    MOK_CUDA_TRY(cudaMemset(table[r], 0, kHeaderBytes));
  }
  MOK_CUDA_TRY(cudaMalloc(&arenas.table, ranks_here * sizeof(uint8_t*)));
  MOK_CUDA_TRY(cudaMemcpy(arenas.table, table.data(), ranks_here * sizeof(uint8_t*), cudaMemcpyHostToDevice));
  if (ranks_here > 1) MOK_CUDA_TRY(cudaMalloc(&arenas.many, ranks_here * sizeof(Rank)));
  MOK_CUDA_TRY(cudaDeviceSynchronize());
  arenas.bytes = rounded;
  return std::nullopt;
}

using Encode = decltype(&cuTensorMapEncodeTiled);

// The driver's function, found through the runtime, so that nothing links against the driver.
Encode tensor_map_encode() {
  static const Encode encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result;
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result);
    return reinterpret_cast<Encode>(function);
  }();
  return encode;
}

// A bf16 array, innermost dimension first, read in boxes of 64 columns x `rows` rows.
bool encode(CUtensorMap& map, const bf16* data, std::vector<cuuint64_t> dims, cuuint32_t rows) {
  std::vector<cuuint64_t> strides;
  cuuint64_t bytes = sizeof(bf16);
  for (size_t i = 0; i + 1 < dims.size(); ++i) strides.push_back(bytes *= dims[i]);
  std::vector<cuuint32_t> box(dims.size(), 1), steps(dims.size(), 1);
  box[0] = 64;
  box[1] = rows;
  return tensor_map_encode()(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, static_cast<cuuint32_t>(dims.size()),
                             const_cast<bf16*>(data), dims.data(), strides.data(), box.data(), steps.data(),
                             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// The i-th rank's part of every array.
std::optional<std::string> rank_of(const ForwardCall& c, int32_t i, const Arenas& arenas, Failure* host_failure,
                                   Rank& rank) {
  Shape s = c.shape;
  s.rank += i;
  const int64_t h = s.hidden, inner = s.intermediate, e = s.local_experts;
  rank.shape = s;
  rank.tiles = sm90::tile_counts(s);
  rank.save = c.save;
  rank.activation_limit = c.activation_limit;
  rank.timeout_ns = static_cast<int64_t>(c.timeout_s * 1e9);
  rank.entry_timeout_ns = static_cast<int64_t>(c.entry_timeout_s * 1e9);
  rank.x = c.x + i * s.tokens * h;
  rank.expert_ids = c.expert_ids + i * s.slots();
  rank.expert_weights = c.expert_weights + i * s.slots();
  rank.y = c.y + i * s.tokens * h;
  rank.row_table = c.row_table + i * max_rows(s);
  rank.expert_rows = c.expert_rows + i * e;
  rank.bad_tokens = c.bad_tokens + i;
  rank.pre_activations = c.pre_activations ? c.pre_activations + i * s.ring_rows * 2 * inner : nullptr;
  rank.rows = c.rows + i * s.ring_rows * h;
  rank.hidden = c.hidden + i * s.ring_rows * inner;
  rank.workspace = c.workspace + i * WorkspaceLayout(s).bytes;
  rank.arenas = arenas.table;
  rank.host_failure = host_failure;
  const auto u = [](int64_t n) { return static_cast<cuuint64_t>(n); };
  const int64_t weights = i * e * h * inner;
  const bool encoded = encode(rank.rows_map, rank.rows, {u(h), u(s.ring_rows)}, kRowBlock) &&
                       encode(rank.hidden_map, rank.hidden, {u(inner), u(s.ring_rows)}, kRowBlock) &&
                       encode(rank.wi_0_map, c.wi_0 + weights, {u(inner), u(h), u(e)}, 64) &&
                       encode(rank.wi_1_map, c.wi_1 + weights, {u(inner), u(h), u(e)}, 64) &&
                       encode(rank.wo_map, c.wo + weights, {u(h), u(inner), u(e)}, 64);
  if (!encoded) return "cuTensorMapEncodeTiled refused a tensor map";
  return std::nullopt;
}

std::optional<std::string> launch(const void* kernel, int32_t grid, int32_t threads, int64_t shared, Launch& launch,
                                  cudaStream_t stream) {
  void* arguments[] = {&launch};
  MOK_CUDA_TRY(cudaLaunchKernel(kernel, dim3(grid), dim3(threads), arguments, shared, stream));
  return std::nullopt;
}

}  // namespace

std::optional<std::string> prepare(const Shape& shape, int32_t ranks_here) {
  Memory& memory = Memory::instance();
  const std::lock_guard lock(memory.mutex);
  int id;
  MOK_CUDA_TRY(cudaGetDevice(&id));
  if (!memory.host_failure) {
    MOK_CUDA_TRY(cudaHostAlloc(&memory.host_failure, sizeof(Failure), cudaHostAllocMapped | cudaHostAllocPortable));
    *memory.host_failure = {};
  }
  Device& device = memory.devices[id];
  if (auto error = load_kernels(device, id, shape)) return error;
  return make_arenas(device.arenas[ranks_here], shape, ranks_here);
}

std::optional<std::string> launch_forward(const ForwardCall& call, cudaStream_t stream) {
  Memory& memory = Memory::instance();
  const std::lock_guard lock(memory.mutex);
  int id;
  MOK_CUDA_TRY(cudaGetDevice(&id));
  Device& device = memory.devices[id];
  const Arenas& arenas = device.arenas[call.ranks_here];
  const WorkspaceLayout layout(call.shape);
  Launch arguments{};
  arguments.ranks_here = call.ranks_here;
  arguments.communication_ctas = call.communication_ctas;
  std::vector<Rank> many(call.ranks_here);
  for (int32_t i = 0; i < call.ranks_here; ++i) {
    if (auto error = rank_of(call, i, arenas, memory.host_failure, many[i])) return error;
    MOK_CUDA_TRY(cudaMemsetAsync(many[i].workspace, 0, layout.zeroed, stream));
  }
  arguments.one = many[0];
  if (call.ranks_here > 1) {
    arguments.many = arenas.many;
    MOK_CUDA_TRY(cudaMemcpyAsync(arenas.many, many.data(), many.size() * sizeof(Rank), cudaMemcpyHostToDevice, stream));
    MOK_CUDA_TRY(cudaStreamSynchronize(stream));
  }
  const int32_t per_rank = std::max(1, device.multiprocessors / call.ranks_here);
  const int32_t schedulers = std::min<int32_t>(per_rank, kMaxScheduleBlocks);
  if (auto error = launch(schedule_forward_kernel(), schedulers * call.ranks_here, schedule_threads(),
                          schedule_shared_bytes(call.shape), arguments, stream)) {
    return error;
  }
  const int32_t least = call.ranks_here * (call.communication_ctas > 0 ? 2 : 1);
  const int32_t grid = std::max(least, device.multiprocessors - call.reserved_sms);
  return launch(sm90::forward_kernel(), grid, sm90::forward_threads(), sm90::forward_shared_bytes(), arguments, stream);
}

std::optional<std::string> failure_text() {
  const Failure* failure = Memory::instance().host_failure;
  if (!failure || *static_cast<const volatile int32_t*>(&failure->code) == 0) return std::nullopt;
  const std::string rank = "rank " + std::to_string(failure->rank);
  if (failure->code == 2) {
    return rank + " waited longer than entry_timeout_s for rank " + std::to_string(failure->counter) +
           " to start its call; restart the process";
  }
  return rank + " waited longer than timeout_s before a task of kind " + std::to_string(failure->task) +
         " for counter " + std::to_string(failure->counter) + "; restart the process";
}

}  // namespace mok::cuda
