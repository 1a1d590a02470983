// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <iosfwd>

namespace cpattn {

/// The types of elements of tensors.
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

/// Whether elements are codes of 8 bits, which stand for numbers: float8 of either kind, or int8.
bool is_code(DType dtype);
/// Bytes of one element.
int64_t element_size(DType dtype);
/// The name of the enumerator, but "bool" for bool8.
const char* dtype_name(DType dtype);
std::ostream& operator<<(std::ostream& out, DType dtype);

}  // namespace cpattn
