// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <iosfwd>

namespace cpattn {

/// The element types of tensors.
enum class DType : uint8_t {
  float32,
  float64,
  float16,
  bfloat16,
  int8,
  uint8,
  int32,
  int64,
  bool8,
  float8_e4m3fn,
  float8_e5m2
};

constexpr DType kLastDType = DType::float8_e5m2;

/// Whether elements are 8-bit codes of quantised numbers: either float8 type, or int8.
bool is_code(DType dtype);
/// Bytes of one element.
int64_t element_size(DType dtype);
/// The name of the enumerator, except "bool" for bool8.
const char* dtype_name(DType dtype);
std::ostream& operator<<(std::ostream& out, DType dtype);

}  // namespace cpattn
