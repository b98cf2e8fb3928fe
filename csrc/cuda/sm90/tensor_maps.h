// The tensor maps of a rank's arguments on Hopper.
#pragma once

#include "cuda/sm90/arguments.h"

namespace mok::cuda::sm90 {

// From the other arguments, which are filled in. False: a map could not be made.
bool make_tensor_maps(ForwardRank& rank);
bool make_tensor_maps(BackwardRank& rank);

}  // namespace mok::cuda::sm90
