#include "cuda/runtime/peers.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "cuda/runtime/nccl.h"

namespace mok::cuda {
namespace {

constexpr int64_t kMiB = 1 << 20;

// By communicator and size class.
struct Table {
  std::mutex mutex;
  std::map<std::pair<void*, SizeClass>, Peers> peers;

  static Table& instance() {
    static Table* table = new Table;  // never destroyed, as the CUDA context may go first
    return *table;
  }
};

// Rounded up to quarter octaves: 4, 5, 6 or 7 times a power of two.
int64_t round_up_quarter_octave(int64_t bytes) {
  const int64_t unit = std::max<int64_t>(1, static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(bytes))) / 4);
  return round_up(bytes, unit);
}

// What ranks tell each other before they register memory, each word the least of all ranks'.
struct Agreement {
  int32_t has_memory, class_mib, minus_class_mib, header, minus_header;
  int32_t free_mib[kMaxRanks];  // each rank's own; of others the largest number

  Agreement(int32_t rank, const SizeClass& size, bool has_memory, int64_t free_bytes)
      : has_memory(has_memory),
        class_mib(static_cast<int32_t>(size.bytes / kMiB)),
        minus_class_mib(-class_mib),
        header(sizeof(ArenaHeader)),
        minus_header(-header) {
    std::fill(std::begin(free_mib), std::end(free_mib), std::numeric_limits<int32_t>::max());
    free_mib[rank] = static_cast<int32_t>(free_bytes / kMiB);
  }

  Error refusal(int32_t ranks) const {
    if (class_mib != -minus_class_mib || header != -minus_header) {
      return "ranks of one group are in calls of different sizes, or run different builds of mok_jax";
    }
    if (has_memory) return std::nullopt;
    const int32_t rank = static_cast<int32_t>(std::min_element(free_mib, free_mib + ranks) - free_mib);
    return "rank " + std::to_string(rank) + " has " + std::to_string(free_mib[rank]) +
           " MiB of GPU memory left outside XLA's pool, and an arena takes " + std::to_string(class_mib) +
           " MiB: lower XLA_PYTHON_CLIENT_MEM_FRACTION (0.75 unless set), or the tokens of a step";
  }
};

Error reduce(Agreement& mine, NcclCommunicator communicator) {
  cudaStream_t stream;
  Agreement* on_device;
  MOK_CUDA_TRY(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  MOK_CUDA_TRY(cudaMalloc(&on_device, sizeof(Agreement)));
  MOK_CUDA_TRY(cudaMemcpyAsync(on_device, &mine, sizeof(Agreement), cudaMemcpyHostToDevice, stream));
  MOK_NCCL_TRY(all_reduce(on_device, on_device, sizeof(Agreement) / 4, Nccl::kInt32, Nccl::kMin, communicator, stream));
  MOK_CUDA_TRY(cudaMemcpyAsync(&mine, on_device, sizeof(Agreement), cudaMemcpyDeviceToHost, stream));
  MOK_CUDA_TRY(cudaStreamSynchronize(stream));
  MOK_CUDA_TRY(cudaFree(on_device));
  MOK_CUDA_TRY(cudaStreamDestroy(stream));
  return std::nullopt;
}

// Also of its own arena a rank uses the address that the window has.
Error register_window(NcclCommunicator communicator, void* memory, int64_t bytes, int32_t ranks, Peers& peers) {
  NcclWindow window;
  MOK_NCCL_TRY(window_register(communicator, memory, bytes, &window, Nccl::kCollectiveSymmetric));
  for (int32_t r = 0; r < ranks; ++r) {
    void* there = nullptr;
    MOK_NCCL_TRY(peer_pointer(window, 0, r, &there));
    if (!there) {
      return "rank " + std::to_string(peers.rank) + " cannot reach the memory of rank " + std::to_string(r) +
             " of its group: expert parallelism needs GPUs of one NVLink domain; or use implementation=\"xla\"";
    }
    peers.arenas[r] = static_cast<uint8_t*>(there);
  }
  return std::nullopt;
}

Error make(NcclCommunicator communicator, int32_t ranks, const SizeClass& size, Peers& peers) {
  MOK_NCCL_TRY(comm_user_rank(communicator, &peers.rank));
  size_t free_bytes, total;
  MOK_CUDA_TRY(cudaMemGetInfo(&free_bytes, &total));
  void* memory = nullptr;
  const bool has_memory = Nccl::instance().mem_alloc(&memory, size.bytes) == 0;
  cudaGetLastError();  // of memory that was refused
  if (has_memory) {
    MOK_CUDA_TRY(cudaMemset(memory, 0, kHeaderBytes));
    MOK_CUDA_TRY(cudaDeviceSynchronize());
  }
  Agreement agreement(peers.rank, size, has_memory, free_bytes);
  if (auto error = reduce(agreement, communicator)) return error;
  if (auto refusal = agreement.refusal(ranks)) {
    if (has_memory) Nccl::instance().mem_free(memory);
    return refusal;
  }
  return register_window(communicator, memory, size.bytes, ranks, peers);
}

}  // namespace

SizeClass size_class(const Shape& shape) { return {round_up_quarter_octave(round_up(DeviceArena(shape).bytes, kMiB))}; }

Error make_peers(void* communicator, const Shape& shape) {
  const SizeClass size = size_class(shape);
  if (find_peers(communicator, shape)) return std::nullopt;
  if (!Nccl::instance().missing.empty()) return Nccl::instance().missing;
  const auto comm = static_cast<NcclCommunicator>(communicator);
  int ranks;
  MOK_NCCL_TRY(comm_count(comm, &ranks));
  if (ranks != shape.ranks) {
    return "XLA's communicator has " + std::to_string(ranks) + " ranks, the call " + std::to_string(shape.ranks);
  }
  Peers peers;
  if (auto error = make(comm, ranks, size, peers)) return error;
  Table& table = Table::instance();
  const std::lock_guard lock(table.mutex);
  table.peers[{communicator, size}] = peers;
  return std::nullopt;
}

const Peers* find_peers(void* communicator, const Shape& shape) {
  Table& table = Table::instance();
  const std::lock_guard lock(table.mutex);
  const auto found = table.peers.find({communicator, size_class(shape)});
  return found == table.peers.end() ? nullptr : &found->second;
}

}  // namespace mok::cuda
