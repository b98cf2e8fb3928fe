// Attributes of both FFI calls, as mok_jax/megakernel/call.py writes them. -1 leaves a choice to the executor.
#pragma once

#include "ffi/reader.h"

namespace mok::xla_ffi {

struct Attributes {
  const Reader& of;
  int32_t ranks = of.attribute<int32_t>("ranks");                    // EP
  int32_t save = of.attribute<int32_t>("save");                      // enum Save
  int32_t activation = of.attribute<int32_t>("activation");          // enum Activation
  float activation_limit = of.attribute<float>("activation_limit");  // infinity: none
  int64_t ring_rows = of.attribute<int64_t>("ring_rows");
  int64_t minibatch_rows = of.attribute<int64_t>("minibatch_rows");                // or -1
  int32_t communication_workers = of.attribute<int32_t>("communication_workers");  // CPU; or -1
  int32_t compute_workers = of.attribute<int32_t>("compute_workers");              // CPU; or -1
  int64_t delay_seed = of.attribute<int64_t>("delay_seed");                        // CPU; 0: no delays
  double entry_timeout_s = of.attribute<double>("entry_timeout_s");
  double timeout_s = of.attribute<double>("timeout_s");
  int32_t communication_sms = of.attribute<int32_t>("communication_sms");              // GPU; or -1
  int32_t reserved_sms = of.attribute<int32_t>("reserved_sms");                        // GPU; or -1
  ffi::Span<const int64_t> groups = of.attribute<ffi::Span<const int64_t>>("groups");  // GPU; see groups_of
  int64_t program = of.attribute<int64_t>("program");                                  // a hash of its name
  int32_t virtual_ranks = of.attribute<int32_t>("virtual_ranks");  // that one GPU runs side by side: 1, but in tests
};

}  // namespace mok::xla_ffi
