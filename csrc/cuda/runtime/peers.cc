#include "cuda/runtime/peers.h"

#include <algorithm>
#include <limits>
#include <map>
#include <mutex>
#include <utility>

#include "cuda/runtime/nccl.h"
#include "moe/arena.h"

namespace mok::cuda {
namespace {

constexpr int64_t kItem = 2;  // bytes of an element of x
constexpr int64_t kMiB = 1 << 20;

// Memory of every rank of a group, of the same size.
using Window = uint8_t* [kMaxRanks];

// A group, by its communicator.
struct Group {
  int32_t rank = 0;
  Window meetings = {};
  std::map<std::pair<int64_t, int64_t>, Peers> classes;  // by the two numbers of an ArenaClass
};

struct Table {
  std::mutex mutex;
  std::map<void*, Group> groups;

  static Table& instance() {
    static Table* table = new Table;  // never destroyed, as the CUDA context may go first
    return *table;
  }
};

std::pair<int64_t, int64_t> key_of(const ArenaClass& c) { return {c.ids, c.rows}; }

// What ranks tell each other before they register memory: of each word all learn the least.
struct Agreement {
  int32_t has_memory, mib, minus_mib, layout, minus_layout;
  int32_t free_mib[kMaxRanks];  // each rank's own; of others the largest number

  Agreement(int32_t rank, int64_t bytes, bool has_memory, int64_t free_bytes)
      : has_memory(has_memory),
        mib(static_cast<int32_t>(ceil_div(bytes, kMiB))),
        minus_mib(-mib),
        layout(kProtocol),
        minus_layout(-layout) {
    std::fill(std::begin(free_mib), std::end(free_mib), std::numeric_limits<int32_t>::max());
    free_mib[rank] = static_cast<int32_t>(free_bytes / kMiB);
  }

  Error refusal(int32_t ranks) const {
    if (layout != -minus_layout) return "the ranks of an expert-parallel group run different builds of mok_jax";
    if (mib != -minus_mib) return "the ranks of an expert-parallel group are in calls of different sizes";
    if (has_memory) return std::nullopt;
    const int32_t rank = static_cast<int32_t>(std::min_element(free_mib, free_mib + ranks) - free_mib);
    return "rank " + std::to_string(rank) + " has " + std::to_string(free_mib[rank]) +
           " MiB of GPU memory left outside XLA's pool, and what its peers read and write takes " +
           std::to_string(mib) +
           " MiB: lower XLA_PYTHON_CLIENT_MEM_FRACTION (0.75 unless set), or the tokens of a step";
  }
};

Error agree(Agreement& mine, NcclCommunicator communicator) {
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

// Also of its own memory a rank uses the address that the window has.
Error register_window(NcclCommunicator communicator, void* memory, int64_t bytes, int32_t rank, int32_t ranks,
                      Window& window) {
  NcclWindow registered;
  MOK_NCCL_TRY(window_register(communicator, memory, bytes, &registered, Nccl::kCollectiveSymmetric));
  for (int32_t r = 0; r < ranks; ++r) {
    void* there = nullptr;
    MOK_NCCL_TRY(peer_pointer(registered, 0, r, &there));
    if (!there) {
      return "rank " + std::to_string(rank) + " cannot reach the memory of rank " + std::to_string(r) +
             " of its group: expert parallelism needs GPUs of one NVLink domain; or use implementation=\"xla\"";
    }
    window[r] = static_cast<uint8_t*>(there);
  }
  return std::nullopt;
}

// Zeroed before anybody can see it.
Error make_window(NcclCommunicator communicator, int64_t bytes, int32_t rank, int32_t ranks, Window& window) {
  size_t free_bytes, total;
  MOK_CUDA_TRY(cudaMemGetInfo(&free_bytes, &total));
  void* memory = nullptr;
  const bool has_memory = Nccl::instance().mem_alloc(&memory, bytes) == 0;
  cudaGetLastError();  // of memory that was refused
  if (has_memory) {
    MOK_CUDA_TRY(cudaMemset(memory, 0, bytes));
    MOK_CUDA_TRY(cudaDeviceSynchronize());
  }
  Agreement agreement(rank, bytes, has_memory, free_bytes);
  if (auto error = agree(agreement, communicator)) return error;
  if (auto refusal = agreement.refusal(ranks)) {
    if (has_memory) Nccl::instance().mem_free(memory);
    return refusal;
  }
  return register_window(communicator, memory, bytes, rank, ranks, window);
}

Error join(NcclCommunicator communicator, const Shape& shape, Group& group) {
  if (group.meetings[0]) return std::nullopt;
  int ranks;
  MOK_NCCL_TRY(comm_count(communicator, &ranks));
  if (ranks != shape.ranks) {
    return "XLA's communicator has " + std::to_string(ranks) + " ranks, the call " + std::to_string(shape.ranks);
  }
  MOK_NCCL_TRY(comm_user_rank(communicator, &group.rank));
  return make_window(communicator, sizeof(Meeting), group.rank, ranks, group.meetings);
}

Error add_class(NcclCommunicator communicator, const Shape& shape, Group& group) {
  const ArenaClass size(shape, kItem);
  if (group.classes.contains(key_of(size))) return std::nullopt;
  Peers peers;
  peers.rank = group.rank;
  const int32_t ranks = static_cast<int32_t>(shape.ranks);
  const int64_t bytes = SharedArenaLayout(size).bytes;
  if (auto error = make_window(communicator, bytes, group.rank, ranks, peers.arenas)) return error;
  for (int32_t r = 0; r < ranks; ++r) peers.meetings[r] = reinterpret_cast<Meeting*>(group.meetings[r]);
  const std::lock_guard lock(Table::instance().mutex);
  group.classes[key_of(size)] = peers;
  return std::nullopt;
}

}  // namespace

Error make_peers(void* communicator, const Shape& shape) {
  if (find_peers(communicator, shape)) return std::nullopt;
  if (!Nccl::instance().missing.empty()) return Nccl::instance().missing;
  Table& table = Table::instance();
  Group* group;
  {
    const std::lock_guard lock(table.mutex);  // not while others are waited for, which may be threads of this process
    group = &table.groups[communicator];
  }
  const auto nccl = static_cast<NcclCommunicator>(communicator);
  if (auto error = join(nccl, shape, *group)) return error;
  return add_class(nccl, shape, *group);
}

const Peers* find_peers(void* communicator, const Shape& shape) {
  Table& table = Table::instance();
  const std::lock_guard lock(table.mutex);
  const auto group = table.groups.find(communicator);
  if (group == table.groups.end()) return nullptr;
  const auto found = group->second.classes.find(key_of(ArenaClass(shape, kItem)));
  return found == group->second.classes.end() ? nullptr : &found->second;
}

}  // namespace mok::cuda
