// Ranks of one process that run one call together: where they meet, the memory they share, and how they sleep.
// A rank that meets nobody within its time limit cancels the call for all: an error, never a hang.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

#include "moe/program.h"

namespace mok::host {

// Bytes that are recycled, not cleared: what a call finds in its arena is what an earlier one left there.
class Memory {
 public:
  explicit Memory(int64_t bytes);
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  std::byte* data() const { return data_; }

 private:
  int64_t bytes_;
  std::byte* data_;
};

class GroupCall {
 public:
  GroupCall(int64_t ranks, int64_t arena_bytes);

  std::byte* arena(int64_t rank) const { return memory_.data() + rank * arena_bytes_; }
  std::vector<std::byte*> arenas() const;

  // The rank's arena is filled. Blocks until every rank's is; false: out of time, or cancelled.
  bool enter(int64_t rank, double seconds);

  // A peer, or the rank itself, has returned some of the rank's rows.
  void add_arrived(int64_t rank, int32_t band, int32_t rows);
  int32_t arrived(int64_t rank, int32_t band) const { return ports_[rank].arrived[band].load(); }

  // Blocks a worker of `rank` until ready(); false: out of time, or cancelled. ready() may only depend on sequentially
  // consistent atomics whose writers call wake(rank) afterwards.
  template <class Ready>
  bool wait(int64_t rank, double seconds, const Ready& ready) {
    if (ready()) return true;
    Port& port = ports_[rank];
    const auto deadline = std::chrono::steady_clock::now() +
                          std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::duration<double>(seconds));
    std::unique_lock lock(port.mutex);
    ++port.sleepers;
    port.changed.wait_until(lock, deadline, [&] { return cancelled() || ready(); });
    --port.sleepers;
    return !cancelled() && ready();
  }
  void wake(int64_t rank);

  // Ends the call everywhere. The first reason stays.
  void cancel(const std::string& reason);
  bool cancelled() const { return cancelled_.load(); }
  std::string reason() const;

 private:
  friend class Groups;

  struct Port {
    std::atomic<int32_t> arrived[kColumnBands]{};
    std::atomic<int32_t> sleepers{0};
    std::mutex mutex;
    std::condition_variable changed;
  };

  int64_t arena_bytes_;
  Memory memory_;
  std::vector<Port> ports_;
  std::atomic<int64_t> entered_{0};
  std::atomic<bool> cancelled_{false};
  mutable std::mutex reason_mutex_;
  std::string reason_;
  std::vector<bool> joined_;  // guarded by Groups
  int64_t missing_;           // likewise
};

// Finds the call that a rank belongs to. Each rank makes the calls of one (call site, run, group) in program order, so
// its n-th join belongs to the n-th call.
class Groups {
 public:
  struct Key {
    int64_t call_site;
    int64_t run;
    int64_t group;
    auto operator<=>(const Key&) const = default;
  };

  static Groups& instance();
  std::shared_ptr<GroupCall> join(const Key& key, int64_t rank, int64_t ranks, int64_t arena_bytes);

 private:
  std::mutex mutex_;
  std::map<Key, std::deque<std::shared_ptr<GroupCall>>> open_;  // calls that some rank has not joined
};

}  // namespace mok::host
