// Attributes of both FFI calls, as the Python side writes them. -1 leaves a choice to the executor.
#pragma once

#include "xla/ffi/api/ffi.h"

namespace mok::xla_ffi {

struct Attributes {
  int32_t ranks;           // EP
  int32_t save;            // enum Save
  int32_t activation;      // enum Activation
  float activation_limit;  // infinity: none
  int64_t ring_rows;
  int64_t minibatch_rows;                          // or -1
  int32_t communication_workers, compute_workers;  // CPU; or -1
  int64_t delay_seed;                              // CPU; 0: no delays
  double entry_timeout_s, timeout_s;
  int32_t communication_sms, reserved_sms;  // GPU; or -1
  int32_t virtual_ranks;                    // GPU; ranks that one device runs side by side: 1, but in tests
};

}  // namespace mok::xla_ffi

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(
    mok::xla_ffi::Attributes, xla::ffi::StructMember<int32_t>("ranks"), xla::ffi::StructMember<int32_t>("save"),
    xla::ffi::StructMember<int32_t>("activation"), xla::ffi::StructMember<float>("activation_limit"),
    xla::ffi::StructMember<int64_t>("ring_rows"), xla::ffi::StructMember<int64_t>("minibatch_rows"),
    xla::ffi::StructMember<int32_t>("communication_workers"), xla::ffi::StructMember<int32_t>("compute_workers"),
    xla::ffi::StructMember<int64_t>("delay_seed"), xla::ffi::StructMember<double>("entry_timeout_s"),
    xla::ffi::StructMember<double>("timeout_s"), xla::ffi::StructMember<int32_t>("communication_sms"),
    xla::ffi::StructMember<int32_t>("reserved_sms"), xla::ffi::StructMember<int32_t>("virtual_ranks"));
