#include "cuda/runtime/launch.h"

#include <algorithm>
#include <vector>

#include "cuda/kernels.h"
#include "cuda/runtime/arguments.h"
#include "cuda/runtime/device.h"
#include "cuda/sm90/tensor_maps.h"

namespace mok::cuda {
namespace {

// All must be resident at once. Each takes a pair of multiprocessors that lie together, as all of a whole chip do.
Error refuse_too_many_ranks(const Device& device, int32_t ranks_here) {
  const int32_t most = device.multiprocessors / sm90::kPair;
  if (ranks_here <= most) return std::nullopt;
  return "there are " + std::to_string(ranks_here) + " virtual ranks; this device runs at most " +
         std::to_string(most) + " at once";
}

template <class R, class C>
Error fill_all(const C& call, const Arenas& arenas, std::vector<R>& ranks) {
  for (int32_t i = 0; i < call.ranks_here; ++i) {
    fill(call, i, arenas, ranks[i]);
    if (!sm90::make_tensor_maps(call, i, ranks[i])) return "cuTensorMapEncodeTiled refused a tensor map";
  }
  return std::nullopt;
}

template <class R>
Error clear_counters(const std::vector<R>& ranks, cudaStream_t stream) {
  for (const R& rank : ranks) {
    MOK_CUDA_TRY(cudaMemsetAsync(rank.workspace, 0, WorkspaceLayout(rank.shape).zeroed, stream));
  }
  return std::nullopt;
}

// Arguments of several ranks are too large for a launch, which is given where they lie.
template <class R>
Error copy_arguments(const std::vector<R>& ranks, const Arenas& arenas, Launch<R>& arguments, cudaStream_t stream) {
  if (ranks.size() == 1) return std::nullopt;
  const size_t bytes = ranks.size() * sizeof(R);
  MOK_CUDA_TRY(cudaMemcpyAsync(arenas.arguments, ranks.data(), bytes, cudaMemcpyHostToDevice, stream));
  MOK_CUDA_TRY(cudaStreamSynchronize(stream));
  arguments.many = reinterpret_cast<const R*>(arenas.arguments);
  return std::nullopt;
}

template <class R>
Error launch_schedule(const Device& device, Launch<R>& arguments, cudaStream_t stream) {
  const int32_t ctas = std::clamp<int32_t>(device.multiprocessors / arguments.ranks_here, 1, kMaxScheduleChunks);
  arguments.schedule_chunks = ctas;  // so that all CTAs have one, if they are resident
  const int64_t shared_bytes = schedule_shared_bytes(R::kDirection, arguments.one.shape);
  void* pointers[] = {&arguments};
  MOK_CUDA_TRY(cudaLaunchKernel(schedule_kernel(R::kDirection), dim3(ctas * arguments.ranks_here),
                                dim3(schedule_threads()), pointers, shared_bytes, stream));
  return std::nullopt;
}

// A pair of CTAs is enough for a rank to finish, whatever its roles.
template <class R>
Error launch_layer(const Device& device, int32_t reserved_sms, Launch<R>& arguments, cudaStream_t stream) {
  const int32_t pairs = std::max(arguments.ranks_here, (device.multiprocessors - reserved_sms) / sm90::kPair);
  void* pointers[] = {&arguments};
  MOK_CUDA_TRY(cudaLaunchKernel(sm90::layer_kernel(R::kDirection), dim3(pairs * sm90::kPair), dim3(sm90::threads()),
                                pointers, sm90::shared_bytes(), stream));
  return std::nullopt;
}

template <class R, class C>
Error launch(const C& call, cudaStream_t stream) {
  Runtime& runtime = Runtime::instance();
  const std::lock_guard lock(runtime.mutex);
  int id;
  MOK_CUDA_TRY(cudaGetDevice(&id));
  Device& device = runtime.devices[id];
  if (auto error = refuse_too_many_ranks(device, call.ranks_here)) return error;
  const Arenas& arenas = device.arenas[call.ranks_here];
  std::vector<R> ranks(call.ranks_here);
  if (auto error = fill_all(call, arenas, ranks)) return error;
  if (auto error = clear_counters(ranks, stream)) return error;
  Launch<R> arguments{
      .one = ranks[0], .many = nullptr, .ranks_here = call.ranks_here, .communication_ctas = call.communication_ctas};
  if (auto error = copy_arguments(ranks, arenas, arguments, stream)) return error;
  if (auto error = launch_schedule(device, arguments, stream)) return error;
  return launch_layer(device, call.reserved_sms, arguments, stream);
}

}  // namespace

Error launch_forward(const ForwardCall& call, cudaStream_t stream) { return launch<ForwardRank>(call, stream); }
Error launch_backward(const BackwardCall& call, cudaStream_t stream) { return launch<BackwardRank>(call, stream); }

}  // namespace mok::cuda
