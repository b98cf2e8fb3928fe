#include "cuda/launch.h"

#include <algorithm>
#include <bit>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "cuda/kernels.h"
#include "cuda/tensor_map.h"

namespace mok::cuda {
namespace {

#define MOK_CUDA_TRY(call)                                                                                \
  if (const cudaError_t error = (call); error != cudaSuccess) {                                           \
    return std::string(#call) + " failed: " + cudaGetErrorName(error) + ", " + cudaGetErrorString(error); \
  }

// Arenas of the ranks of one device. Never freed: captured graphs hold their addresses.
struct Arenas {
  int64_t bytes = 0;  // of each
  uint8_t* first = nullptr;
  uint8_t** table = nullptr;  // device memory
  std::byte* many = nullptr;  // device memory for the arguments of virtual ranks
};

struct Device {
  int32_t multiprocessors = 0;
  std::map<const void*, int> shared_bytes;
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
  const int schedule_bytes = static_cast<int>(schedule_shared_bytes(shape));
  const int layer_bytes = static_cast<int>(sm90::shared_bytes());
  MOK_CUDA_TRY(cudaDeviceGetAttribute(&device.multiprocessors, cudaDevAttrMultiProcessorCount, id));
  int major, minor;
  MOK_CUDA_TRY(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, id));
  MOK_CUDA_TRY(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, id));
  if (major != 9 || minor != 0) {
    return "no kernel for compute capability " + std::to_string(major) + "." + std::to_string(minor) +
           " yet, only for 9.0 (Hopper); use implementation=\"xla\"";
  }
  for (const auto& [kernel, bytes] :
       {std::pair{schedule_kernel(Direction::forward), schedule_bytes},
        std::pair{schedule_kernel(Direction::backward), 0}, std::pair{sm90::forward_kernel(), layer_bytes},
        std::pair{sm90::backward_kernel(), layer_bytes}}) {
    int& most = device.shared_bytes[kernel];  // what the kernel may use; asking for it also loads the kernel
    if (bytes < most) continue;
    MOK_CUDA_TRY(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    cudaFuncAttributes attributes;
    MOK_CUDA_TRY(cudaFuncGetAttributes(&attributes, kernel));
    most = bytes + 1;
  }
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
  if (ranks_here > 1) MOK_CUDA_TRY(cudaMalloc(&arenas.many, ranks_here * sizeof(BackwardRank)));
  MOK_CUDA_TRY(cudaDeviceSynchronize());
  arenas.bytes = rounded;
  arenas.first = base;
  return std::nullopt;
}

// Whether all maps that were asked for could be made. A map of memory that the call has none of is never used.
struct Encoder {
  bool good = true;

  // Boxes of `width` bytes x `rows` of dimension `of`.
  void bf16s(CUtensorMap& map, const bf16* data, const std::vector<cuuint64_t>& dims, int32_t width, int32_t rows,
             size_t of = 1) {
    if (data) good = encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, data, dims, width, rows, of) && good;
  }
  void grads(CUtensorMap& map, const void* data, bool f32, const std::vector<cuuint64_t>& dims) {
    good = encode(map, f32 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, data, dims, 128, 64) &&
           good;
  }
};

template <class T>
T* nth(T* data, int64_t i, int64_t size) {
  return data ? data + i * size : nullptr;
}

// The i-th rank's part of what both directions have.
void fill_common(const Call& c, int32_t i, const Arenas& arenas, Failure* host_failure, Rank& rank) {
  Shape s = c.shape;
  s.rank += i;
  rank.shape = s;
  rank.tiles = sm90::tile_counts(s);
  rank.save = c.save;
  rank.activation = c.activation;
  rank.activation_limit = c.activation_limit;
  rank.timeout_ns = static_cast<int64_t>(c.timeout_s * 1e9);
  rank.entry_timeout_ns = static_cast<int64_t>(c.entry_timeout_s * 1e9);
  rank.x = nth(c.x, i, s.tokens * s.hidden);
  rank.dy = nth(c.dy, i, s.tokens * s.hidden);
  rank.expert_ids = nth(c.expert_ids, i, s.slots());
  rank.expert_weights = nth(c.expert_weights, i, s.slots());
  rank.out = nth(c.out, i, s.tokens * s.hidden);
  rank.row_table = nth(c.row_table, i, max_rows(s));
  rank.expert_rows = nth(c.expert_rows, i, s.local_experts);
  rank.rows = nth(c.rows, i, s.ring_rows * s.hidden);
  rank.hidden = nth(c.hidden, i, s.ring_rows * s.intermediate);
  rank.workspace = nth(c.workspace, i, WorkspaceLayout(s).bytes);
  rank.arenas = arenas.table;
  rank.host_failure = host_failure;
}

cuuint64_t u64(int64_t n) { return static_cast<cuuint64_t>(n); }

// Of a whole ring.
int64_t pre_activation_elements(const Shape& s) { return s.ring_rows * pre_activation_width(s.intermediate); }

bool fill(const ForwardCall& c, int32_t i, ForwardRank& rank) {
  const Shape& s = c.shape;
  const int64_t h = s.hidden, inner = s.intermediate, e = s.local_experts, weights = i * e * h * inner;
  rank.bad_tokens = c.bad_tokens + i;
  rank.pre_activations = nth(c.pre_activations, i, pre_activation_elements(s));
  const std::vector<cuuint64_t> narrow{u64(inner), u64(s.ring_rows)}, wi{u64(inner), u64(h), u64(e)};
  Encoder encoder;
  encoder.bf16s(rank.rows_128, rank.rows, {u64(h), u64(s.ring_rows)}, 128, 128);
  encoder.bf16s(rank.hidden_128, rank.hidden, narrow, 128, 128);
  encoder.bf16s(rank.wi_0_64, c.wi_0 + weights, wi, 128, 64);
  encoder.bf16s(rank.wi_1_64, c.wi_1 + weights, wi, 128, 64);
  encoder.bf16s(rank.wo_64, c.wo + weights, {u64(h), u64(inner), u64(e)}, 128, 64);
  encoder.bf16s(rank.hidden_64, rank.hidden, narrow, 128, 64);
  return encoder.good;
}

bool fill(const BackwardCall& c, int32_t i, BackwardRank& rank) {
  const Shape& s = c.shape;
  const int64_t h = s.hidden, inner = s.intermediate, e = s.local_experts, ring = s.ring_rows;
  const int64_t size = e * h * inner, weights = i * size, grad_bytes = size * (c.grads_in_f32 ? 4 : 2);
  rank.pre_activations = nth(c.pre_activations, i, pre_activation_elements(s));
  rank.saved_pre_activations = nth(c.saved_pre_activations, i, pre_activation_elements(s));
  rank.saved_rows = c.saved_rows != nullptr;
  rank.grads = nth(c.grads, i, ring * h);
  rank.row_weights = nth(c.row_weights, i, ring);
  rank.router_parts = nth(c.router_parts, i, ring * max_router_parts(inner));
  rank.straddle = nth(c.straddle, i, straddle_elements(h, inner));
  rank.router_grads = nth(c.router_grads, i, s.slots());
  rank.wi_0_grad = nth(static_cast<std::byte*>(c.wi_0_grad), i, grad_bytes);
  rank.wi_1_grad = nth(static_cast<std::byte*>(c.wi_1_grad), i, grad_bytes);
  rank.wo_grad = nth(static_cast<std::byte*>(c.wo_grad), i, grad_bytes);
  rank.grads_in_f32 = c.grads_in_f32;

  const bf16* gate_up_grads = nth(c.gate_up_grads, i, ring * 2 * inner);
  const bf16* saved_rows = nth(c.saved_rows, i, ring * h);
  const std::vector<cuuint64_t> wide{u64(h), u64(ring)}, narrow{u64(inner), u64(ring)};
  const std::vector<cuuint64_t> pair{u64(inner), 2, u64(ring)};
  const std::vector<cuuint64_t> wi{u64(inner), u64(h), u64(e)}, wo{u64(h), u64(inner), u64(e)};
  Encoder encoder;
  encoder.bf16s(rank.rows_128, rank.rows, wide, 128, 128);
  encoder.bf16s(rank.wi_0_64, c.wi_0 + weights, wi, 128, 64);
  encoder.bf16s(rank.wi_1_64, c.wi_1 + weights, wi, 128, 64);
  encoder.bf16s(rank.grads_128, rank.grads, wide, 128, 128);
  encoder.bf16s(rank.wo_128, c.wo + weights, wo, 128, 128);
  encoder.bf16s(rank.gate_up_grads_128, gate_up_grads, pair, 128, 128, 2);
  encoder.bf16s(rank.hidden_128, rank.hidden, narrow, 128, 128);
  encoder.bf16s(rank.wi_0_128, c.wi_0 + weights, wi, 128, 128);
  encoder.bf16s(rank.wi_1_128, c.wi_1 + weights, wi, 128, 128);
  encoder.bf16s(rank.rows_64, rank.rows, wide, 128, 64);
  encoder.bf16s(rank.saved_rows_64, saved_rows, wide, 128, 64);
  encoder.bf16s(rank.grads_64, rank.grads, wide, 128, 64);
  encoder.bf16s(rank.gate_up_grads_64, gate_up_grads, pair, 128, 64, 2);
  encoder.bf16s(rank.hidden_64, rank.hidden, narrow, 128, 64);
  encoder.grads(rank.wi_0_grad_64, rank.wi_0_grad, c.grads_in_f32, wi);
  encoder.grads(rank.wi_1_grad_64, rank.wi_1_grad, c.grads_in_f32, wi);
  encoder.grads(rank.wo_grad_64, rank.wo_grad, c.grads_in_f32, wo);
  return encoder.good;
}

template <class R>
std::optional<std::string> launch_kernel(const void* kernel, int32_t grid, int32_t threads, int64_t shared,
                                         Launch<R>& launch, cudaStream_t stream) {
  void* arguments[] = {&launch};
  MOK_CUDA_TRY(cudaLaunchKernel(kernel, dim3(grid), dim3(threads), arguments, shared, stream));
  return std::nullopt;
}

// The launches of a call: schedule kernel, then layer kernel.
template <class R, class C>
std::optional<std::string> launch(Direction direction, const void* layer_kernel, const C& call, cudaStream_t stream) {
  Memory& memory = Memory::instance();
  const std::lock_guard lock(memory.mutex);
  int id;
  MOK_CUDA_TRY(cudaGetDevice(&id));
  Device& device = memory.devices[id];
  // All must be resident at once. Each takes a pair of multiprocessors that lie together, as all of a whole chip do.
  if (const int32_t most = device.multiprocessors / sm90::kPair; call.ranks_here > most) {
    return "there are " + std::to_string(call.ranks_here) + " virtual ranks; this device runs at most " +
           std::to_string(most) + " at once";
  }
  const Arenas& arenas = device.arenas[call.ranks_here];
  std::vector<R> many(call.ranks_here);
  for (int32_t i = 0; i < call.ranks_here; ++i) {
    fill_common(call, i, arenas, memory.host_failure, many[i]);
    if (!fill(call, i, many[i])) return "cuTensorMapEncodeTiled refused a tensor map";
    MOK_CUDA_TRY(cudaMemsetAsync(many[i].workspace, 0, WorkspaceLayout(call.shape).zeroed, stream));
  }
  Launch<R> arguments{
      .one = many[0], .many = nullptr, .ranks_here = call.ranks_here, .communication_ctas = call.communication_ctas};
  if (call.ranks_here > 1) {
    arguments.many = reinterpret_cast<R*>(arenas.many);
    MOK_CUDA_TRY(cudaMemcpyAsync(arenas.many, many.data(), many.size() * sizeof(R), cudaMemcpyHostToDevice, stream));
    MOK_CUDA_TRY(cudaStreamSynchronize(stream));
  }
  const int32_t schedulers = std::clamp<int32_t>(device.multiprocessors / call.ranks_here, 1, kMaxScheduleBlocks);
  const int64_t shared = direction == Direction::forward ? schedule_shared_bytes(call.shape) : 0;
  if (auto error = launch_kernel(schedule_kernel(direction), schedulers * call.ranks_here, schedule_threads(), shared,
                                 arguments, stream)) {
    return error;
  }
  // A pair is enough for a rank to finish, whatever its roles.
  const int32_t pairs = std::max(call.ranks_here, (device.multiprocessors - call.reserved_sms) / sm90::kPair);
  const int32_t grid = pairs * sm90::kPair;
  return launch_kernel(layer_kernel, grid, sm90::threads(), sm90::shared_bytes(), arguments, stream);
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
  return launch<ForwardRank>(Direction::forward, sm90::forward_kernel(), call, stream);
}

std::optional<std::string> launch_backward(const BackwardCall& call, cudaStream_t stream) {
  return launch<BackwardRank>(Direction::backward, sm90::backward_kernel(), call, stream);
}

Cycles cycles() {
  int id;
  if (cudaGetDevice(&id) != cudaSuccess) return {};
  const uint8_t* arena;
  {
    Memory& memory = Memory::instance();
    const std::lock_guard lock(memory.mutex);  // not while waiting for the device: launches of others need it
    arena = memory.devices[id].arenas[1].first;
  }
  ArenaHeader header{};
  if (!arena || cudaDeviceSynchronize() != cudaSuccess) return {};
  if (cudaMemcpy(&header, arena, sizeof(header), cudaMemcpyDeviceToHost) != cudaSuccess) return {};
  return {header.call, header.cycles};
}

std::optional<std::string> failure_text() {
  const Failure* failure = Memory::instance().host_failure;
  if (!failure || *static_cast<const volatile int32_t*>(&failure->code) == 0) return std::nullopt;
  const std::string rank = "rank " + std::to_string(failure->rank);
  if (failure->code == 2) {
    return rank + " waited longer than entry_timeout_s for rank " + std::to_string(failure->counter) +
           " to start its call; restart the process";
  }
  const std::string waited = rank + " waited longer than timeout_s ";
  if (failure->task < 0) return waited + "for the CTAs that make its schedule; restart the process";
  return waited + "before a " + kTaskNames[failure->task] + " task for counter " + std::to_string(failure->counter) +
         "; restart the process";
}

}  // namespace mok::cuda
