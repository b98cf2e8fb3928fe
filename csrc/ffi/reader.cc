#include "ffi/reader.h"

#include <sstream>

namespace mok::xla_ffi {
namespace {

bool fits(const ffi::AnyBuffer& buffer, ffi::DataType type, Dimensions dimensions) {
  const auto sizes = buffer.dimensions();
  if (buffer.element_type() != type || sizes.size() != dimensions.size()) return false;
  const auto* size = sizes.begin();
  for (const Dimension& wanted : dimensions) {
    const bool undecided = wanted.axis && wanted.size < 0;
    if (undecided ? *size <= 0 : *size != wanted.size) return false;
    ++size;
  }
  return true;
}

std::string text_of(const ffi::AnyBuffer& buffer) {
  std::ostringstream text;
  text << buffer.element_type() << "[";
  const char* comma = "";
  for (const int64_t size : buffer.dimensions()) {
    text << comma << size;
    comma = ",";
  }
  return text.str() + "]";
}

std::string text_of(ffi::DataType type, Dimensions dimensions) {
  std::ostringstream text;
  text << type << "[";
  const char* comma = "";
  for (const Dimension& wanted : dimensions) {
    text << comma << (wanted.axis && wanted.size < 0 ? "any" : std::to_string(wanted.size));
    comma = ",";
  }
  return text.str() + "]";
}

}  // namespace

Reader::Reader(const char* target, const ffi::RemainingArgs& operands, const ffi::RemainingRets& results,
               const ffi::Dictionary& attributes)
    : target_(target), operands_(operands), results_(results), attributes_(attributes) {
  const ffi::ErrorOr<int32_t> given = attributes.get<int32_t>("interface");
  if (given.has_value() && *given == MOK_INTERFACE) return;
  refuse("the program is of " + (given.has_value() ? "interface " + std::to_string(*given) : "an unknown interface") +
         ", the extension of interface " + std::to_string(MOK_INTERFACE) +
         ": mok_jax's Python sources and its compiled extension are of different builds. Build the extension again "
         "(`make build` or `pip install .`), or export the program again");
}

ffi::DataType Reader::operand_type() const {
  const ffi::ErrorOr<ffi::AnyBuffer> buffer = operands_.get<ffi::AnyBuffer>(operands_read_);
  return buffer.has_value() ? buffer->element_type() : ffi::DataType::INVALID;
}

ffi::DataType Reader::result_type() const {
  const ffi::ErrorOr<ffi::Result<ffi::AnyBuffer>> buffer = results_.get<ffi::AnyBuffer>(results_read_);
  return buffer.has_value() ? (*buffer)->element_type() : ffi::DataType::INVALID;
}

void* Reader::take_operand(const char* name, ffi::DataType type, Dimensions dimensions) {
  const ffi::ErrorOr<ffi::AnyBuffer> buffer = operands_.get<ffi::AnyBuffer>(operands_read_++);
  if (buffer.has_value()) return check(std::string("operand ") + name, *buffer, type, dimensions);
  refuse("operand " + std::string(name) + " is missing: there are " + std::to_string(operands_.size()));
}

void* Reader::take_result(const char* name, ffi::DataType type, Dimensions dimensions) {
  const ffi::ErrorOr<ffi::Result<ffi::AnyBuffer>> buffer = results_.get<ffi::AnyBuffer>(results_read_++);
  if (buffer.has_value()) return check(std::string("result ") + name, **buffer, type, dimensions);
  refuse("result " + std::string(name) + " is missing: there are " + std::to_string(results_.size()));
}

void* Reader::check(const std::string& name, const ffi::AnyBuffer& buffer, ffi::DataType type,
                    Dimensions dimensions) const {
  if (!fits(buffer, type, dimensions)) {
    refuse(name + " is " + text_of(buffer) + "; it must be " + text_of(type, dimensions));
  }
  const auto* size = buffer.dimensions().begin();
  for (const Dimension& wanted : dimensions) {
    if (wanted.axis) wanted.axis->size = *size;
    ++size;
  }
  return buffer.element_count() ? buffer.untyped_data() : nullptr;
}

void Reader::expect_end() const {
  if (operands_.size() > operands_read_) {
    refuse("there are " + std::to_string(operands_.size()) + " operands; it must be " + std::to_string(operands_read_));
  }
  if (results_.size() > results_read_) {
    refuse("there are " + std::to_string(results_.size()) + " results; it must be " + std::to_string(results_read_));
  }
}

void Reader::refuse(const std::string& text) const { throw WrongCall(std::string(target_) + ": " + text); }

}  // namespace mok::xla_ffi
