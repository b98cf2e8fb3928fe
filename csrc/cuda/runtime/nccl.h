// What arenas need of NCCL, of the library that XLA has loaded: nothing links against it, and nothing is built from its
// headers. Names and numbers are those of nccl.h.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <string>

namespace mok::cuda {

using NcclCommunicator = struct ncclComm*;
using NcclWindow = struct ncclWindow_vidmem*;

struct Nccl {
  static constexpr int kInt32 = 2, kMin = 3;  // ncclInt32, ncclMin
  static constexpr int kCollectiveSymmetric = 1;
  static constexpr int kLeastVersion = 22900;  // the first that tells where peers have a window

  int (*get_version)(int*);
  const char* (*get_error_string)(int);
  int (*comm_user_rank)(NcclCommunicator, int*);
  int (*comm_count)(NcclCommunicator, int*);
  int (*all_reduce)(const void*, void*, size_t, int, int, NcclCommunicator, cudaStream_t);
  int (*mem_alloc)(void**, size_t);
  int (*mem_free)(void*);
  int (*window_register)(NcclCommunicator, void*, size_t, NcclWindow*, int);
  int (*peer_pointer)(NcclWindow, size_t, int, void**);

  int version;
  std::string missing;  // why it cannot be used; empty: it can

  static const Nccl& instance();

 private:
  Nccl();
};

}  // namespace mok::cuda

// Ends the function that it stands in with what went wrong, if anything.
#define MOK_NCCL_TRY(call)                                                                      \
  if (const int error = Nccl::instance().call; error != 0) {                                    \
    return "NCCL's " #call " failed: " + std::string(Nccl::instance().get_error_string(error)); \
  }
