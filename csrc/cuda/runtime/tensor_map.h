// Tensor maps: how the copy engine sees an array in device memory.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <vector>

namespace mok::cuda {

// Describes an array, its innermost dimension first, in boxes that are `width` bytes wide, 64 or 128, which is also the
// swizzle's width, and have `rows` of dimension `of`. False: the driver refused it, or knows no tensor maps.
bool encode(CUtensorMap& map, CUtensorMapDataType type, const void* data, const std::vector<cuuint64_t>& dims,
            cuuint32_t width, cuuint32_t rows, size_t of = 1);

}  // namespace mok::cuda
