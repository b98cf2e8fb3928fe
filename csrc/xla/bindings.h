// How both platforms' handlers bind operands and results: all as buffers of any type, in the order of the Python side.
// The last result is workspace that GPUs need.
#pragma once

#include <utility>

#include "xla/attributes.h"

namespace mok::xla_ffi {
namespace ffi = ::xla::ffi;

using Buffer = ffi::AnyBuffer;
using Result = ffi::Result<ffi::AnyBuffer>;

template <class V>
V* data(const Buffer& buffer) {
  return static_cast<V*>(buffer.untyped_data());
}
template <class V>
V* data(Result& result) {
  return static_cast<V*>(result->untyped_data());
}

template <int operands, int results, class Binding>
auto with_buffers(Binding binding) {
  if constexpr (operands > 0) {
    return with_buffers<operands - 1, results>(std::move(binding).template Arg<Buffer>());
  } else if constexpr (results > 0) {
    return with_buffers<operands, results - 1>(std::move(binding).template Ret<Buffer>());
  } else {
    return std::move(binding).template Attrs<Attributes>();
  }
}

}  // namespace mok::xla_ffi
