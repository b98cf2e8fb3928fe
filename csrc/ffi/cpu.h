// The CPU's FFI entry points, for registration from Python.
#pragma once

#include "xla/ffi/api/c_api.h"

extern "C" XLA_FFI_Error* mok_cpu_instantiate(XLA_FFI_CallFrame* frame);
extern "C" XLA_FFI_Error* mok_cpu_forward(XLA_FFI_CallFrame* frame);
extern "C" XLA_FFI_Error* mok_cpu_backward(XLA_FFI_CallFrame* frame);

// The type of the state that `instantiate` makes.
XLA_FFI_TypeId* mok_call_site_type_id();
XLA_FFI_TypeInfo* mok_call_site_type_info();
