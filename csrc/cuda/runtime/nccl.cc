#include "cuda/runtime/nccl.h"

#include <dlfcn.h>

#include <type_traits>

namespace mok::cuda {
namespace {

// One that is loaded already, perhaps by way of LD_PRELOAD: a second copy would know nothing of XLA's communicators.
void* loaded_library() {
  if (dlsym(RTLD_DEFAULT, "ncclCommWindowRegister")) return RTLD_DEFAULT;
  return dlopen("libnccl.so.2", RTLD_NOW | RTLD_NOLOAD);
}

std::string text_of(int version) {
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

}  // namespace

Nccl::Nccl() : version(0) {
  void* library = loaded_library();
  const auto find = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
    if (!function && missing.empty()) missing = std::string("the NCCL that XLA has loaded has no ") + name;
  };
  find(get_version, "ncclGetVersion");
  if (get_version && get_version(&version) == 0 && version < kLeastVersion) {
    missing = "several GPUs want NCCL " + text_of(kLeastVersion) + " or newer, and XLA has loaded " + text_of(version) +
              ": pip install -U nvidia-nccl-cu13, or use implementation=\"xla\"";
    return;
  }
  find(get_error_string, "ncclGetErrorString");
  find(comm_user_rank, "ncclCommUserRank");
  find(comm_count, "ncclCommCount");
  find(all_reduce, "ncclAllReduce");
  find(mem_alloc, "ncclMemAlloc");
  find(mem_free, "ncclMemFree");
  find(window_register, "ncclCommWindowRegister");
  find(peer_pointer, "ncclGetPeerDevicePointer");
}

const Nccl& Nccl::instance() {
  static const Nccl nccl;
  return nccl;
}

}  // namespace mok::cuda
