// Ranks of a group that share one process and one GPU. Each has a stream and a part of the multiprocessors, and for
// itself what in the product each GPU has: its state, its record of a failure, its meeting and its arenas. One thread
// of the host launches for all of them, in whatever order a test wants.
#pragma once

#include <numeric>

#include "cuda/runtime/arguments.h"
#include "cuda/schedule.h"
#include "cuda/test/cases.cuh"
#include "cuda/test/layer_step.cuh"
#include "cuda/test/spinning.cuh"

namespace mok::cuda::test {

inline constexpr int64_t kMostRanks = 4;
// So few that other ranks' schedule kernels, while they wait for a rank, leave it the multiprocessors of its layer
// kernel, which ends only when all of its CTAs have been there.
inline constexpr int32_t kScheduleCtas = 8;

// Never more of them in a process than the device has queues: in a common one kernels would wait for those of a peer.
inline Stream& stream_of(int64_t rank) {
  static Stream* const streams = new Stream[kMostRanks];
  return streams[rank];
}

// A rank's launches, recorded once and repeated.
class Graph {
 public:
  template <class Launch>
  Graph(cudaStream_t stream, const Launch& launch) : stream_(stream) {
    cudaGraph_t graph;
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed));
    launch();
    check(cudaStreamEndCapture(stream, &graph));
    check(cudaGraphInstantiate(&graph_, graph, 0));
    check(cudaGraphDestroy(graph));
    check(cudaGraphUpload(graph_, stream));  // it may allocate
    check(cudaStreamSynchronize(stream));
  }
  Graph(const Graph&) = delete;
  ~Graph() { cudaGraphExecDestroy(graph_); }
  void launch() const { check(cudaGraphLaunch(graph_, stream_)); }

 private:
  const cudaStream_t stream_;
  cudaGraphExec_t graph_;
};

inline std::string text_of(FailureCode code) {
  constexpr const char* kNames[] = {"no failure",   "timeout",    "entry_timeout", "cancelled",
                                    "disagreement", "concurrent", "aborted",       "misplaced"};
  return kNames[static_cast<int32_t>(code)];
}

class Group {
 public:
  explicit Group(int64_t ranks)
      : ranks_(ranks),
        meetings_(ranks),
        states_(ranks),
        numbers_(consecutive(static_cast<int32_t>(ranks))),
        devices_(ranks) {
    check(cudaMemset(meetings_.data(), 0, ranks * sizeof(Meeting)));
    check(cudaMemset(states_.data(), 0, ranks * sizeof(DeviceState)));
    const Device& real = Runtime::instance().device(0);
    if (!real.backend) throw Failed(real.error.value_or("a step comes first, which prepares the device"));
    for (int64_t r = 0; r < ranks; ++r) {
      devices_[r].backend = real.backend;
      devices_[r].multiprocessors = real.multiprocessors;
      devices_[r].state = states_.data() + r;
      devices_[r].failure = failures_[r].get();
    }
    // It is not to be loaded beside kernels that wait for it.
    cudaFuncAttributes attributes;
    check(cudaFuncGetAttributes(&attributes, abort_kernel()));
    stream_of(0);
    check(cudaDeviceSynchronize());
  }

  // Before a call of this class is launched. Allocates, so not while a rank waits for another.
  void make_arenas(const Shape& s) {
    const ArenaClass size(s, 2);
    Peers& peers = classes_[{size.ids, size.rows}];
    for (int64_t r = 0; r < ranks_ && !peers.arenas[r]; ++r) {
      const int64_t bytes = SharedArenaLayout(size).bytes;
      arenas_.push_back(std::make_unique<Array<uint8_t>>(bytes));
      check(cudaMemset(arenas_.back()->data(), 0, bytes));
      peers.arenas[r] = arenas_.back()->data();
      peers.meetings[r] = meetings_.data() + r;
    }
    check(cudaDeviceSynchronize());
  }

  // One rank's call, enqueued on its stream.
  template <class C>
  void launch(const C& call, int64_t r) {
    launch_schedule(call, r);
    launch_layer(call, r);
  }
  template <class C>
  void launch_schedule(const C& call, int64_t r) {
    const std::vector ranks{arguments(call, r)};
    check(cudaMemsetAsync(ranks[0].workspace, 0, WorkspaceLayout(call.shape).zeroed, stream_of(r)));
    const Grid grid{.ctas = kScheduleCtas,
                    .threads = schedule_threads(),
                    .shared_bytes = schedule_shared_bytes(call.direction, call.shape),
                    .communication_ctas = 0,
                    .schedule_chunks = kScheduleCtas};
    check(launch_kernel(schedule_kernel(call.direction), ranks, grid, stream_of(r)));
  }
  template <class C>
  void launch_layer(const C& call, int64_t r) {
    const Backend& backend = *devices_[r].backend;
    const int32_t clusters = devices_[r].multiprocessors / backend.cluster_ctas / static_cast<int32_t>(ranks_);
    const Grid grid{.ctas = clusters * backend.cluster_ctas,
                    .threads = backend.threads,
                    .shared_bytes = backend.shared_bytes,
                    .communication_ctas = call.communication_ctas,
                    .schedule_chunks = 0};
    check(backend.launch(std::vector{arguments(call, r)}, grid, stream_of(r)));
  }
  // What the host launches where it cannot launch the call.
  template <class C>
  void launch_abort(const C& call, int64_t r) {
    Rank rank = arguments(call, r);
    void* pointers[] = {&rank};
    check(cudaLaunchKernel(abort_kernel(), dim3(1), dim3(1), pointers, 0, stream_of(r)));
  }

  // Until all that was launched is over, but no longer than `limit_s` since the clock has begun.
  void expect_end(const Clock& clock, double limit_s) const {
    for (int64_t r = 0; r < ranks_; ++r) {
      if (stream_of(r).ends(limit_s - clock.seconds())) continue;
      const cudaError_t error = cudaStreamQuery(stream_of(r));
      if (error != cudaErrorNotReady) check(error);
      throw Failed("rank " + std::to_string(r) + " has not ended after " + clock.text() + "; " + failures());
    }
  }

  FailureCode code(int64_t r) const {
    return static_cast<FailureCode>(*static_cast<const volatile int32_t*>(&failures_[r]->code));
  }
  const Failure& failure(int64_t r) const { return *failures_[r].get(); }
  std::string failures() const {
    std::string all;
    for (int64_t r = 0; r < ranks_; ++r) {
      const Failure& f = failure(r);
      all += (r ? ", rank " : "rank ") + std::to_string(r) + " " + text_of(code(r));
      if (code(r) == FailureCode::none) continue;
      all += " (says rank " + std::to_string(f.rank) + ", task " + std::to_string(f.task) + ", counter " +
             std::to_string(f.counter) + ", value " + std::to_string(f.value) + ", target " + std::to_string(f.target) +
             ")";
    }
    return all;
  }
  void expect_no_failure() const {
    for (int64_t r = 0; r < ranks_; ++r) {
      if (code(r) != FailureCode::none) throw Failed(failures());
    }
  }

 private:
  static std::vector<int32_t> consecutive(int32_t count) {
    std::vector<int32_t> numbers(count);
    std::iota(numbers.begin(), numbers.end(), 0);
    return numbers;
  }

  template <class R, class C>
  R arguments_as(C call, int64_t r) {
    const ArenaClass size(call.shape, 2);
    const auto peers = classes_.find({size.ids, size.rows});
    if (peers == classes_.end()) throw Failed("the group has no arenas of the call's class");
    call.peers = &peers->second;
    R rank{};
    fill(call, static_cast<int32_t>(r), devices_[r], rank);
    rank.where = numbers_.data() + r;
    return rank;
  }
  ForwardRank arguments(const ForwardCall& call, int64_t r) { return arguments_as<ForwardRank>(call, r); }
  BackwardRank arguments(const BackwardCall& call, int64_t r) { return arguments_as<BackwardRank>(call, r); }

  const int64_t ranks_;
  const Array<Meeting> meetings_;
  const Array<DeviceState> states_;
  const Array<int32_t> numbers_;  // as the mesh has them
  const Mapped<Failure> failures_[kMostRanks];
  std::vector<Device> devices_;
  std::vector<std::unique_ptr<Array<uint8_t>>> arenas_;
  std::map<std::pair<int64_t, int64_t>, Peers> classes_;  // by the two numbers of an ArenaClass
};

}  // namespace mok::cuda::test
