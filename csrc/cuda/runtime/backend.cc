#include "cuda/runtime/backend.h"

#include "cuda/architectures.h"

namespace mok::cuda {

#define DECLARE(major, minor, name, folder, nvcc) \
  namespace folder {                              \
  const Backend& backend();                       \
  }
MOK_ARCHITECTURES(DECLARE)
#undef DECLARE

namespace {

struct Row {
  int major, minor;
  const char* name;
  const Backend& (*backend)();
};

#define ROW(major, minor, name, folder, nvcc) {major, minor, name, folder::backend},
constexpr Row kRows[] = {MOK_ARCHITECTURES(ROW)};
#undef ROW

}  // namespace

const Backend* find_backend(int major, int minor) {
  for (const Row& row : kRows) {
    if (row.major == major && row.minor == minor) return &row.backend();
  }
  return nullptr;
}

std::string backend_names() {
  std::string names;
  for (const Row& row : kRows) {
    names += (names.empty() ? "" : ", ") + std::to_string(row.major) + "." + std::to_string(row.minor) + " (" +
             row.name + ")";
  }
  return names;
}

}  // namespace mok::cuda
