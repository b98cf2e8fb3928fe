#include "cuda/runtime/launch.h"

#include <algorithm>
#include <vector>

#include "cuda/runtime/arguments.h"
#include "cuda/runtime/device.h"
#include "cuda/schedule.h"

namespace mok::cuda {
namespace {

// All must be resident at once. Each takes multiprocessors that lie together, as all of a whole chip do.
Error refuse_too_many_ranks(const Device& device, int32_t ranks_here) {
  const int32_t most = std::min<int32_t>(device.multiprocessors / device.backend->cluster_ctas, kMaxRanks);
  if (ranks_here <= most) return std::nullopt;
  return "there are " + std::to_string(ranks_here) + " virtual ranks; this device runs at most " +
         std::to_string(most) + " at once";
}

template <class R>
Error clear_counters(const std::vector<R>& ranks, cudaStream_t stream) {
  for (const R& rank : ranks) {
    MOK_CUDA_TRY(cudaMemsetAsync(rank.workspace, 0, WorkspaceLayout(rank.shape).zeroed, stream));
  }
  return std::nullopt;
}

// How many CTAs make the schedules of all ranks here. A layer kernel ends when each of its clusters has had its turn,
// on multiprocessors of its own; so where most of the GPU is other processes', ranks of the group perhaps, the CTAs
// that wait here for them must not stand everywhere.
int32_t schedule_ctas(const Device& device, int32_t reserved_sms) {
  const int32_t own = device.multiprocessors - reserved_sms;
  return 2 * own >= device.multiprocessors ? own : own / 4;
}

template <class R>
Error launch_schedule(const Device& device, const Call& call, const std::vector<R>& ranks, cudaStream_t stream) {
  const int32_t ranks_here = static_cast<int32_t>(ranks.size());
  const int32_t ctas_in_all = schedule_ctas(device, call.reserved_sms);
  const int32_t ctas = std::clamp<int32_t>(ctas_in_all / ranks_here, 1, kMaxScheduleChunks);
  const Grid grid{.ctas = ctas * ranks_here,
                  .threads = schedule_threads(),
                  .shared_bytes = schedule_shared_bytes(R::kDirection, ranks[0].shape),
                  .communication_ctas = 0,
                  .schedule_chunks = ctas};  // so that all CTAs have one, if they are resident
  return launch_kernel(schedule_kernel(R::kDirection), ranks, grid, stream);
}

template <class R>
Error launch_layer(const Device& device, const Call& call, const std::vector<R>& ranks, cudaStream_t stream) {
  const Backend& backend = *device.backend;
  const int32_t clusters =
      std::max(call.ranks_here, (device.multiprocessors - call.reserved_sms) / backend.cluster_ctas);
  const Grid grid{.ctas = clusters * backend.cluster_ctas,
                  .threads = backend.threads,
                  .shared_bytes = backend.shared_bytes,
                  .communication_ctas = call.communication_ctas,
                  .schedule_chunks = 0};
  return backend.launch(ranks, grid, stream);
}

template <class R>
Error launch_all(const Device& device, const Call& call, const std::vector<R>& ranks, cudaStream_t stream) {
  if (device.error) return device.error;
  if (auto error = clear_counters(ranks, stream)) return error;
  if (auto error = launch_schedule(device, call, ranks, stream)) return error;
  return launch_layer(device, call, ranks, stream);
}

// That this rank is not coming, as far as that can be done: they may have begun the call.
void tell_peers(const Rank& rank, cudaStream_t stream) {
  if (!rank.device) return;
  void* pointers[] = {const_cast<Rank*>(&rank)};
  cudaLaunchKernel(abort_kernel(), dim3(1), dim3(1), pointers, 0, stream);
}

template <class R, class C>
Error launch(const C& call, cudaStream_t stream) {
  int id;
  MOK_CUDA_TRY(cudaGetDevice(&id));
  Device& device = Runtime::instance().device(id);
  const std::lock_guard lock(device.mutex);
  if (!device.backend) return device.error;
  if (auto error = refuse_too_many_ranks(device, call.ranks_here)) return error;
  std::vector<R> ranks(call.ranks_here);
  for (int32_t i = 0; i < call.ranks_here; ++i) fill(call, i, device, ranks[i]);
  const Error error = launch_all(device, call, ranks, stream);
  if (error && call.peers) tell_peers(ranks[0], stream);
  return error;
}

}  // namespace

Error launch_forward(const ForwardCall& call, cudaStream_t stream) { return launch<ForwardRank>(call, stream); }
Error launch_backward(const BackwardCall& call, cudaStream_t stream) { return launch<BackwardRank>(call, stream); }

}  // namespace mok::cuda
