#include "cuda/runtime/peers.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <map>
#include <mutex>
#include <thread>
#include <utility>

#include "cuda/runtime/nccl.h"
#include "moe/arena.h"

namespace mok::cuda {
namespace {

constexpr int64_t kItem = 2;  // bytes of an element of x
constexpr int64_t kMiB = 1 << 20;

// Memory of every rank of a group, of the same size.
using Window = uint8_t* [kMaxRanks];

using ClassKey = std::pair<int64_t, int64_t>;  // the two numbers of an ArenaClass

// A group, by its communicator.
struct Group {
  int32_t rank = 0;
  Window meetings = {};
  std::map<ClassKey, Peers> classes;
  std::map<ClassKey, Error> refused;  // why a class was not made when that was tried last
  Error stuck;                        // why none can be made any more: others were not there to agree
};

struct Table {
  std::mutex mutex;
  std::map<void*, Group> groups;

  static Table& instance() {
    static Table* table = new Table;  // never destroyed, as the CUDA context may go first
    return *table;
  }
};

ClassKey key_of(const ArenaClass& c) { return {c.ids, c.rows}; }

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

// Until all that the stream was given is over; false: not within the limit.
bool wait_for(cudaStream_t stream, double limit_s) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(limit_s);
  while (cudaStreamQuery(stream) == cudaErrorNotReady) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  return true;
}

// Of each word all learn the least. Where a rank does not come, its memory stays with the collective that waits for it.
Error agree(Agreement& mine, NcclCommunicator communicator, double limit_s, Group& group) {
  cudaStream_t stream;
  Agreement* on_device;
  MOK_CUDA_TRY(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  MOK_CUDA_TRY(cudaMalloc(&on_device, sizeof(Agreement)));
  MOK_CUDA_TRY(cudaMemcpyAsync(on_device, &mine, sizeof(Agreement), cudaMemcpyHostToDevice, stream));
  MOK_NCCL_TRY(all_reduce(on_device, on_device, sizeof(Agreement) / 4, Nccl::kInt32, Nccl::kMin, communicator, stream));
  if (!wait_for(stream, limit_s)) {
    group.stuck =
        "rank " + std::to_string(group.rank) +
        " waited longer than entry_timeout_s for the other ranks to make the memory of its call: one is late, "
        "or in a call of another size; restart the process";
    return group.stuck;
  }
  MOK_CUDA_TRY(cudaMemcpy(&mine, on_device, sizeof(Agreement), cudaMemcpyDeviceToHost));
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
Error make_window(NcclCommunicator communicator, int64_t bytes, int32_t ranks, double limit_s, Group& group,
                  Window& window) {
  size_t free_bytes, total;
  MOK_CUDA_TRY(cudaMemGetInfo(&free_bytes, &total));
  void* memory = nullptr;
  const bool has_memory = Nccl::instance().mem_alloc(&memory, bytes) == 0;
  cudaGetLastError();  // of memory that was refused
  if (has_memory) {
    MOK_CUDA_TRY(cudaMemset(memory, 0, bytes));
    MOK_CUDA_TRY(cudaDeviceSynchronize());
  }
  Agreement agreement(group.rank, bytes, has_memory, free_bytes);
  if (auto error = agree(agreement, communicator, limit_s, group)) return error;
  if (auto refusal = agreement.refusal(ranks)) {
    if (has_memory) Nccl::instance().mem_free(memory);
    return refusal;
  }
  return register_window(communicator, memory, bytes, group.rank, ranks, window);
}

Error join(NcclCommunicator communicator, const Shape& shape, double limit_s, Group& group) {
  if (group.meetings[0]) return std::nullopt;
  int ranks;
  MOK_NCCL_TRY(comm_count(communicator, &ranks));
  if (ranks != shape.ranks) {
    return "XLA's communicator has " + std::to_string(ranks) + " ranks, the call " + std::to_string(shape.ranks);
  }
  MOK_NCCL_TRY(comm_user_rank(communicator, &group.rank));
  return make_window(communicator, sizeof(Meeting), ranks, limit_s, group, group.meetings);
}

Error add_class(NcclCommunicator communicator, const Shape& shape, double limit_s, Group& group) {
  const ArenaClass size(shape, kItem);
  Peers peers;
  peers.rank = group.rank;
  const int32_t ranks = static_cast<int32_t>(shape.ranks);
  const int64_t bytes = SharedArenaLayout(size).bytes;
  if (auto error = make_window(communicator, bytes, ranks, limit_s, group, peers.arenas)) return error;
  for (int32_t r = 0; r < ranks; ++r) peers.meetings[r] = reinterpret_cast<Meeting*>(group.meetings[r]);
  const std::lock_guard lock(Table::instance().mutex);
  group.classes[key_of(size)] = peers;
  return std::nullopt;
}

Error make(NcclCommunicator communicator, const Shape& shape, double limit_s, Group& group) {
  if (!Nccl::instance().missing.empty()) return Nccl::instance().missing;
  if (group.stuck) return group.stuck;
  if (auto error = join(communicator, shape, limit_s, group)) return error;
  return add_class(communicator, shape, limit_s, group);
}

}  // namespace

void make_peers(void* communicator, const Shape& shape, double entry_timeout_s) {
  Table& table = Table::instance();
  const ClassKey key = key_of(ArenaClass(shape, kItem));
  Group* group;
  {
    const std::lock_guard lock(table.mutex);  // not while others are waited for, which may be threads of this process
    group = &table.groups[communicator];
    if (group->classes.contains(key)) return;
  }
  const Error error = make(static_cast<NcclCommunicator>(communicator), shape, entry_timeout_s, *group);
  const std::lock_guard lock(table.mutex);
  group->refused[key] = error;
}

Error find_peers(void* communicator, const Shape& shape, const Peers*& peers) {
  Table& table = Table::instance();
  const ClassKey key = key_of(ArenaClass(shape, kItem));
  const std::lock_guard lock(table.mutex);
  Group& group = table.groups[communicator];
  const auto found = group.classes.find(key);
  if (found == group.classes.end()) return group.refused[key];
  peers = &found->second;
  return std::nullopt;
}

}  // namespace mok::cuda
