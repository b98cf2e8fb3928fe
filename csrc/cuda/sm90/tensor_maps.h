// The tensor maps of a rank's arguments on Hopper.
#pragma once

#include "cuda/params.h"
#include "cuda/runtime/launch.h"

namespace mok::cuda::sm90 {

// Of the i-th rank of a call, whose other arguments are filled in. A map of memory that the call has none of stays as
// it is, and is never used. False: a map could not be made.
bool make_tensor_maps(const ForwardCall& call, int32_t i, ForwardRank& rank);
bool make_tensor_maps(const BackwardCall& call, int32_t i, BackwardRank& rank);

}  // namespace mok::cuda::sm90
