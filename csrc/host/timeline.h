// What the workers of all ranks did, and when: for pictures of a call. Nothing is recorded unless someone has asked.
#pragma once

#include <atomic>
#include <chrono>
#include <mutex>
#include <utility>
#include <vector>

#include "moe/program.h"

namespace mok::host {

// One task. Times are those of the steady clock.
struct Event {
  Direction direction;
  int32_t rank, worker;  // of a call; workers that communicate come first
  bool communicates;
  Task task{};
  std::chrono::steady_clock::time_point begin{}, ready{}, end{};  // ready: what it waits for is there
};

// Events of all calls since the last start().
class Timeline {
 public:
  static Timeline& instance() {
    static Timeline* timeline = new Timeline;  // never destroyed, as threads may outlive static objects at exit
    return *timeline;
  }

  void start() {
    take();
    recording_.store(true, std::memory_order_relaxed);
  }
  // Ends the recording.
  std::vector<Event> take() {
    recording_.store(false, std::memory_order_relaxed);
    const std::lock_guard lock(mutex_);
    return std::exchange(events_, {});
  }
  bool recording() const { return recording_.load(std::memory_order_relaxed); }

 private:
  friend class WorkerTimeline;

  void add(const std::vector<Event>& events) {
    const std::lock_guard lock(mutex_);
    events_.insert(events_.end(), events.begin(), events.end());
  }

  std::atomic<bool> recording_{false};
  std::mutex mutex_;
  std::vector<Event> events_;
};

// A worker's own part of a call: locks nothing until the worker has done its last task.
class WorkerTimeline {
 public:
  // `who` says which worker of which call it is.
  explicit WorkerTimeline(const Event& who) : event_(who), recording_(Timeline::instance().recording()) {}
  ~WorkerTimeline() {
    if (recording_) Timeline::instance().add(events_);
  }
  WorkerTimeline(const WorkerTimeline&) = delete;

  void begin(const Task& task) {
    if (!recording_) return;
    event_.task = task;
    event_.begin = std::chrono::steady_clock::now();
  }
  void ready() {
    if (recording_) event_.ready = std::chrono::steady_clock::now();
  }
  void end() {
    if (!recording_) return;
    event_.end = std::chrono::steady_clock::now();
    events_.push_back(event_);
  }

 private:
  Event event_;
  bool recording_;
  std::vector<Event> events_;
};

}  // namespace mok::host
