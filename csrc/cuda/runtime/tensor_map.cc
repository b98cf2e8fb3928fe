#include "cuda/runtime/tensor_map.h"

#include <cuda_runtime.h>

namespace mok::cuda {
namespace {

using Encode = decltype(&cuTensorMapEncodeTiled);

// The driver's function, found through the runtime, so that nothing links against the driver.
Encode tensor_map_encode() {
  static const Encode encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result;
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result);
    return reinterpret_cast<Encode>(function);
  }();
  return encode;
}

}  // namespace

bool encode(CUtensorMap& map, CUtensorMapDataType type, const void* data, const std::vector<cuuint64_t>& dims,
            cuuint32_t width, cuuint32_t rows, size_t of) {
  if (!tensor_map_encode()) return false;
  const cuuint32_t size = type == CU_TENSOR_MAP_DATA_TYPE_FLOAT32 ? 4 : 2;
  std::vector<cuuint64_t> strides;
  cuuint64_t bytes = size;
  for (size_t i = 0; i + 1 < dims.size(); ++i) strides.push_back(bytes *= dims[i]);
  std::vector<cuuint32_t> box(dims.size(), 1), steps(dims.size(), 1);
  box[0] = width / size;
  box[of] = rows;
  return tensor_map_encode()(&map, type, static_cast<cuuint32_t>(dims.size()), const_cast<void*>(data), dims.data(),
                             strides.data(), box.data(), steps.data(), CU_TENSOR_MAP_INTERLEAVE_NONE,
                             width == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
                             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace mok::cuda
