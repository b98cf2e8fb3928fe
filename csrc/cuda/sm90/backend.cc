// Hopper's row of the table of architectures.
#include "cuda/runtime/backend.h"

#include "cuda/sm90/kernels.h"
#include "cuda/sm90/tensor_maps.h"

namespace mok::cuda::sm90 {
namespace {

const void* kernel(Direction direction) {
  return direction == Direction::forward ? forward_kernel() : backward_kernel();
}

// R: the kernel's arguments of a rank.
template <class R, class Common>
Error launch_layer(const std::vector<Common>& ranks, const Grid& grid, cudaStream_t stream) {
  std::vector<R> all;
  for (const Common& rank : ranks) {
    R& mine = all.emplace_back();
    static_cast<Common&>(mine) = rank;
    if (!make_tensor_maps(mine)) return "cuTensorMapEncodeTiled refused a tensor map";
  }
  return launch_kernel(kernel(R::kDirection), all, grid, stream);
}

}  // namespace

const Backend& backend() {
  static const Backend row{
      .cluster_ctas = kPair,
      .threads = threads(),
      .shared_bytes = shared_bytes(),
      .kernel = kernel,
      .tile_counts = tile_counts,
      .launch_forward = launch_layer<ForwardRank, cuda::ForwardRank>,
      .launch_backward = launch_layer<BackwardRank, cuda::BackwardRank>,
  };
  return row;
}

}  // namespace mok::cuda::sm90
