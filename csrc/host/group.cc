#include "host/group.h"

#include <bit>
#include <new>

namespace mok::host {
namespace {

constexpr std::align_val_t kAlignment{4096};

// Free memory by size, a power of two. Never destroyed: threads may outlive static objects at exit.
struct Pool {
  std::mutex mutex;
  std::map<int64_t, std::vector<std::byte*>> free;

  static Pool& instance() {
    static Pool* pool = new Pool;
    return *pool;
  }
};

}  // namespace

Memory::Memory(int64_t bytes) : bytes_(static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(bytes)))) {
  Pool& pool = Pool::instance();
  const std::lock_guard lock(pool.mutex);
  auto& free = pool.free[bytes_];
  if (free.empty()) {
    data_ = static_cast<std::byte*>(::operator new(bytes_, kAlignment));
  } else {
    data_ = free.back();
    free.pop_back();
  }
}

Memory::~Memory() {
  Pool& pool = Pool::instance();
  const std::lock_guard lock(pool.mutex);
  pool.free[bytes_].push_back(data_);
}

GroupCall::GroupCall(int64_t ranks, int64_t arena_bytes)
    : arena_bytes_(arena_bytes), memory_(ranks * arena_bytes), ports_(ranks), joined_(ranks, false), missing_(ranks) {}

std::vector<std::byte*> GroupCall::arenas() const {
  std::vector<std::byte*> result;
  for (size_t rank = 0; rank < ports_.size(); ++rank) result.push_back(arena(rank));
  return result;
}

bool GroupCall::enter(int64_t rank, double seconds) {
  const int64_t ranks = static_cast<int64_t>(ports_.size());
  if (++entered_ == ranks) {
    for (int64_t peer = 0; peer < ranks; ++peer) wake(peer);
  }
  return wait(rank, seconds, [&] { return entered_.load() == ranks; });
}

void GroupCall::add_arrived(int64_t rank, int32_t band, int32_t rows) {
  ports_[rank].arrived[band] += rows;
  wake(rank);
}

// Either the sleeper sees what has changed when it checks, holding the mutex, or we see the sleeper.
void GroupCall::wake(int64_t rank) {
  Port& port = ports_[rank];
  if (port.sleepers.load() == 0) return;
  {
    const std::lock_guard lock(port.mutex);
  }
  port.changed.notify_all();
}

void GroupCall::cancel(const std::string& reason) {
  {
    const std::lock_guard lock(reason_mutex_);
    if (cancelled_.load()) return;
    reason_ = reason;
    cancelled_ = true;
  }
  for (size_t rank = 0; rank < ports_.size(); ++rank) wake(rank);
}

std::string GroupCall::reason() const {
  const std::lock_guard lock(reason_mutex_);
  return reason_;
}

Groups& Groups::instance() {
  static Groups* groups = new Groups;
  return *groups;
}

std::shared_ptr<GroupCall> Groups::join(const Key& key, int64_t rank, int64_t ranks, int64_t arena_bytes) {
  if (ranks == 1) return std::make_shared<GroupCall>(1, arena_bytes);
  const std::lock_guard lock(mutex_);
  auto& calls = open_[key];
  size_t n = 0;
  while (n < calls.size() && calls[n]->joined_[rank]) ++n;
  if (n == calls.size()) calls.push_back(std::make_shared<GroupCall>(ranks, arena_bytes));
  std::shared_ptr<GroupCall> call = calls[n];
  call->joined_[rank] = true;
  if (--call->missing_ == 0) calls.pop_front();  // every rank joins in order, so the first call completes first
  if (calls.empty()) open_.erase(key);
  return call;
}

}  // namespace mok::host
