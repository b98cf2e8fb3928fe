// What the runtime knows of an architecture.
#pragma once

#include <string>
#include <vector>

#include "cuda/params.h"
#include "cuda/runtime/error.h"

namespace mok::cuda {

struct Grid {
  int32_t ctas, threads;
  int64_t shared_bytes;
  int32_t communication_ctas;  // as in Launch
  int32_t schedule_chunks;     // likewise
};

struct Backend {
  int32_t cluster_ctas;  // that come together; so many are enough for a rank to finish, whatever their roles
  int32_t threads;       // of a CTA of the layer kernels
  int64_t shared_bytes;  // likewise
  const void* (*kernel)(Direction);
  TileCounts (*tile_counts)(const Shape&);  // of H and I alone
  // The layer's kernel, for one rank or several virtual ones.
  Error (*launch_forward)(const std::vector<ForwardRank>&, const Grid&, cudaStream_t);
  Error (*launch_backward)(const std::vector<BackwardRank>&, const Grid&, cudaStream_t);

  Error launch(const std::vector<ForwardRank>& ranks, const Grid& grid, cudaStream_t stream) const {
    return launch_forward(ranks, grid, stream);
  }
  Error launch(const std::vector<BackwardRank>& ranks, const Grid& grid, cudaStream_t stream) const {
    return launch_backward(ranks, grid, stream);
  }
};

// That of a device with this compute capability; null: there is none.
const Backend* find_backend(int major, int minor);

// Those that there are, such as "9.0 (Hopper)".
std::string backend_names();

// Launches a kernel that takes one Launch<R>. Arguments of several ranks are too large for it, which is given where
// they lie: they are copied from host memory, so not while a graph is captured.
template <class R>
Error launch_kernel(const void* kernel, const std::vector<R>& ranks, const Grid& grid, cudaStream_t stream) {
  Launch<R> launch{.one = ranks[0],
                   .many = nullptr,
                   .ranks_here = static_cast<int32_t>(ranks.size()),
                   .communication_ctas = grid.communication_ctas,
                   .schedule_chunks = grid.schedule_chunks};
  void* many = nullptr;
  if (ranks.size() > 1) {
    const size_t bytes = ranks.size() * sizeof(R);
    MOK_CUDA_TRY(cudaMallocAsync(&many, bytes, stream));
    MOK_CUDA_TRY(cudaMemcpyAsync(many, ranks.data(), bytes, cudaMemcpyHostToDevice, stream));
    MOK_CUDA_TRY(cudaStreamSynchronize(stream));
    launch.many = static_cast<const R*>(many);
  }
  void* pointers[] = {&launch};
  MOK_CUDA_TRY(cudaLaunchKernel(kernel, dim3(grid.ctas), dim3(grid.threads), pointers, grid.shared_bytes, stream));
  if (many) MOK_CUDA_TRY(cudaFreeAsync(many, stream));
  return std::nullopt;
}

}  // namespace mok::cuda
