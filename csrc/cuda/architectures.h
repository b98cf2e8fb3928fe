// The architectures that have kernels of the layer: the only file outside their folders that names any. C++, CMake and
// the tests read this table; Python asks the extension for it.
//
// A row: compute capability, the name that users know, the folder and namespace, and what nvcc calls the architecture.
#pragma once

// clang-format off
#define MOK_ARCHITECTURES(ROW) \
  ROW(9, 0, "Hopper", sm90, 90a)
// clang-format on

// What all architectures share is compiled for these too, so that it stays portable.
#define MOK_NEXT_ARCHITECTURES "100f"
