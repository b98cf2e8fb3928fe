// Reads attributes, operands and results of an FFI call one after the other, on both platforms. What is missing, or has
// another type or size than what executors will read and write, is thrown as a WrongCall that names it.
//
// Bound by RemainingArgs, RemainingRets and a Dictionary, since XLA's own check of a fixed number would come first, and
// name nothing.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "moe/row_table.h"
#include "xla/ffi/api/ffi.h"

namespace mok::xla_ffi {
namespace ffi = ::xla::ffi;

struct WrongCall : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A dimension that several buffers have: the first of them tells its size, which the others must have, too.
struct Axis {
  int64_t size = -1;
  operator int64_t() const { return size; }
};

// Of a buffer: an axis or a number.
struct Dimension {
  Dimension(Axis& shared) : axis(&shared), size(shared.size) {}
  Dimension(int64_t number) : size(number) {}
  Axis* axis = nullptr;
  int64_t size;
};
using Dimensions = std::initializer_list<Dimension>;

// Values of V that cross the FFI as unsigned integers, because nobody may have written some of them: JAX's debug modes
// look for NaN in floats.
template <class V>
struct Bits {};

template <class V>
struct Crossing {
  using Value = V;
  static constexpr ffi::DataType type = std::is_same_v<V, float>                                     ? ffi::F32
                                        : std::is_same_v<V, int32_t> || std::is_same_v<V, RowSource> ? ffi::S32
                                        : std::is_same_v<V, uint8_t>                                 ? ffi::U8
                                                                                                     : ffi::BF16;
  static_assert(type != ffi::BF16 || sizeof(V) == 2, "the bfloat16 of some executor");
};
template <class V>
struct Crossing<Bits<V>> {
  using Value = V;
  static constexpr ffi::DataType type = sizeof(V) == 2 ? ffi::U16 : ffi::U32;
  static_assert(sizeof(V) == 2 || sizeof(V) == 4);
};

class Reader {
 public:
  // Throws if the program was made by Python sources of another interface.
  Reader(const char* target, const ffi::RemainingArgs& operands, const ffi::RemainingRets& results,
         const ffi::Dictionary& attributes);

  template <class V>
  V attribute(const char* name) const {
    const ffi::ErrorOr<V> value = attributes_.get<V>(name);
    if (value.has_error()) refuse("attribute " + std::string(name) + ": " + value.error().message());
    return *value;
  }

  // Null where there are no elements.
  template <class V>
  typename Crossing<V>::Value* operand(const char* name, Dimensions dimensions) {
    return static_cast<typename Crossing<V>::Value*>(take_operand(name, Crossing<V>::type, dimensions));
  }
  template <class V>
  typename Crossing<V>::Value* result(const char* name, Dimensions dimensions) {
    return static_cast<typename Crossing<V>::Value*>(take_result(name, Crossing<V>::type, dimensions));
  }

  // What the next operand, or the next result, is of; INVALID if there is none.
  ffi::DataType operand_type() const;
  ffi::DataType result_type() const;

  // All of a list of buffers, which must be all that the call has.
  template <class Buffers>
  Buffers all() {
    Buffers buffers{*this};
    expect_end();
    return buffers;
  }

  [[noreturn]] void refuse(const std::string& text) const;

 private:
  void* take_operand(const char* name, ffi::DataType type, Dimensions dimensions);
  void* take_result(const char* name, ffi::DataType type, Dimensions dimensions);
  void* check(const std::string& name, const ffi::AnyBuffer& buffer, ffi::DataType type, Dimensions dimensions) const;
  void expect_end() const;

  const char* target_;
  const ffi::RemainingArgs& operands_;
  const ffi::RemainingRets& results_;
  const ffi::Dictionary& attributes_;
  size_t operands_read_ = 0, results_read_ = 0;
};

}  // namespace mok::xla_ffi
