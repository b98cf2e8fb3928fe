// What the device tests share: tests that register by name, arrays on the device, comparisons that name the first
// difference. A program runs the tests named on its command line, or all, and ends with 1 if one fails.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

namespace mok::cuda::test {

struct Failed : std::runtime_error {
  using std::runtime_error::runtime_error;
};

inline void check(cudaError_t error) {
  if (error != cudaSuccess) throw Failed(std::string(cudaGetErrorName(error)) + ": " + cudaGetErrorString(error));
}

// An array on the device. Every byte is `kUnwritten` until something else is put there.
inline constexpr int kUnwritten = 0xa5;

template <class T>
class Array {
 public:
  explicit Array(size_t size) : size_(size) {
    check(cudaMalloc(&data_, size * sizeof(T)));
    check(cudaMemset(data_, kUnwritten, size * sizeof(T)));
  }
  explicit Array(const std::vector<T>& values) : Array(values.size()) {
    check(cudaMemcpy(data_, values.data(), size_ * sizeof(T), cudaMemcpyHostToDevice));
  }
  Array(const Array&) = delete;
  ~Array() { cudaFree(data_); }

  T* data() const { return data_; }
  std::vector<T> host() const {
    std::vector<T> values(size_);
    check(cudaMemcpy(values.data(), data_, size_ * sizeof(T), cudaMemcpyDeviceToHost));
    return values;
  }

 private:
  size_t size_;
  T* data_ = nullptr;
};

template <class T>
T unwritten() {
  T value;
  std::memset(static_cast<void*>(&value), kUnwritten, sizeof(T));
  return value;
}

// Host memory that the device writes and reads.
template <class T>
class Mapped {
 public:
  Mapped() {
    check(cudaHostAlloc(&data_, sizeof(T), cudaHostAllocMapped));
    *data_ = T{};
  }
  Mapped(const Mapped&) = delete;
  ~Mapped() { cudaFreeHost(data_); }
  T* operator->() const { return data_; }
  T* get() const { return data_; }

 private:
  T* data_ = nullptr;
};

inline int32_t attribute(cudaDeviceAttr name) {
  int value;
  check(cudaDeviceGetAttribute(&value, name, 0));
  return value;
}
inline int32_t multiprocessors() { return attribute(cudaDevAttrMultiProcessorCount); }

// Launches and waits; kernels that need more than 48 KB of shared memory get them.
template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared, const Arguments&... arguments) {
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared)));
  kernel<<<grid, block, shared>>>(arguments...);
  check(cudaGetLastError());
  check(cudaDeviceSynchronize());
}

inline std::string text_of(double value) { return std::to_string(value); }
inline std::string text_of(__nv_bfloat16 value) { return std::to_string(__bfloat162float(value)); }

template <class T>
bool same_bits(const T& a, const T& b) {
  return std::memcmp(&a, &b, sizeof(T)) == 0;
}

// Bits, so that NaN equals itself and -0 does not equal 0. `where(i)` says in words which element i is.
template <class T, class Where>
void expect_equal(const std::vector<T>& actual, const std::vector<T>& expected, const Where& where) {
  if (actual.size() != expected.size()) throw Failed("sizes differ");
  size_t different = 0, first = 0;
  for (size_t i = actual.size(); i-- > 0;) {
    if (same_bits(actual[i], expected[i])) continue;
    ++different;
    first = i;
  }
  if (different == 0) return;
  throw Failed(std::to_string(different) + " of " + std::to_string(actual.size()) + " elements differ; first " +
               where(first) + ": " + text_of(actual[first]) + " instead of " + text_of(expected[first]));
}
template <class T>
void expect_equal(const std::vector<T>& actual, const std::vector<T>& expected) {
  expect_equal(actual, expected, [](size_t i) { return "element " + std::to_string(i); });
}

inline std::map<std::string, std::function<void()>>& tests() {
  static std::map<std::string, std::function<void()>> all;
  return all;
}
struct Register {
  Register(const char* name, std::function<void()> test) { tests()[name] = std::move(test); }
};

inline int run(int argc, char** argv) {
  std::vector<std::string> names(argv + 1, argv + argc);
  if (names.empty()) {
    for (const auto& [name, test] : tests()) names.push_back(name);
  }
  bool failed = false;
  for (const std::string& name : names) {
    std::string outcome = "no such test";
    if (tests().contains(name)) {
      try {
        tests()[name]();
        outcome = "ok";
      } catch (const Failed& failure) {
        outcome = failure.what();
      }
    }
    failed |= outcome != "ok";
    std::printf("%s: %s\n", name.c_str(), outcome.c_str());
    std::fflush(stdout);
  }
  return failed;
}

}  // namespace mok::cuda::test

// TEST(name) { ... }: throw Failed, or return.
#define TEST(name)                                                              \
  static void test_##name();                                                    \
  static const ::mok::cuda::test::Register register_##name(#name, test_##name); \
  static void test_##name()
