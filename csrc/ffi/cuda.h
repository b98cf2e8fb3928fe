// The GPU's FFI entry points, for registration from Python.
#pragma once

#include "xla/ffi/api/c_api.h"

extern "C" XLA_FFI_Error* mok_cuda_forward_prepare(XLA_FFI_CallFrame* frame);
extern "C" XLA_FFI_Error* mok_cuda_forward_initialize(XLA_FFI_CallFrame* frame);
extern "C" XLA_FFI_Error* mok_cuda_forward(XLA_FFI_CallFrame* frame);
extern "C" XLA_FFI_Error* mok_cuda_backward_prepare(XLA_FFI_CallFrame* frame);
extern "C" XLA_FFI_Error* mok_cuda_backward_initialize(XLA_FFI_CallFrame* frame);
extern "C" XLA_FFI_Error* mok_cuda_backward(XLA_FFI_CallFrame* frame);
