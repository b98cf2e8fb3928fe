// XLA's communicator of an expert-parallel group, as a handler borrows it. XLA offers it on GPUs from jaxlib 0.11.2 on.
#pragma once

#include <optional>
#include <vector>

#include "ffi/attributes.h"
#include "xla/ffi/api/collectives_api.h"

namespace mok::xla_ffi {

using Communicators = ffi::internal::CommunicatorContextBase<ffi::internal::ErrorPolicy>;

// Where XLA offers none, a handler is given nothing.
struct MaybeCommunicators {};

// The groups of a call: each a rank's place in the program, in the order of ranks.
inline std::vector<std::vector<int64_t>> groups_of(const Attributes& a) {
  std::vector<std::vector<int64_t>> groups(a.groups.size() / a.ranks);
  for (size_t i = 0; i < a.groups.size(); ++i) groups[i / a.ranks].push_back(a.groups[i]);
  return groups;
}

}  // namespace mok::xla_ffi

template <>
struct xla::ffi::CtxDecoding<mok::xla_ffi::MaybeCommunicators> {
  using Type = std::optional<mok::xla_ffi::Communicators>;

  // Versions of one major number only add to what there is.
  static std::optional<Type> Decode(const XLA_FFI_Api* api, XLA_FFI_InvokeContext* context, DiagnosticEngine&) {
    XLA_FFI_InvokeContext_FindExtension_Args args{};
    args.struct_size = XLA_FFI_InvokeContext_FindExtension_Args_STRUCT_SIZE;
    args.ctx = context;
    args.extension_type = XLA_FFI_Extension_Collectives;
    if (XLA_FFI_Error* error = api->XLA_FFI_InvokeContext_FindExtension(&args)) {
      internal::DestroyError(api, error);
      return Type();
    }
    if (!args.extension || args.extension->id.major_version != XLA_FFI_Extension_Collectives_MajorVersion)
      return Type();
    return Type(Type::value_type(api, reinterpret_cast<const XLA_FFI_Collectives_Extension*>(args.extension)));
  }
};
