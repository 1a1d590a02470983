// SPDX-License-Identifier: Apache-2.0
#include "reference/codes.h"

#include <cmath>
#include <limits>

namespace cpattn::reference {
namespace {

/// The number of a code that is neither infinite nor NaN.
double finite(uint8_t code, int mantissa_bits, int bias) {
  const int mantissa = code & ((1 << mantissa_bits) - 1);
  const int exponent = (code & 127) >> mantissa_bits;
  const double size =
      exponent == 0 ? std::ldexp(mantissa, 1 - bias - mantissa_bits)
                    : std::ldexp((1 << mantissa_bits) + mantissa, exponent - bias - mantissa_bits);
  return code >> 7 != 0 ? -size : size;
}

}  // namespace

double float8_e4m3fn(uint8_t code) {
  if ((code & 127) == 127) return std::numeric_limits<double>::quiet_NaN();
  return finite(code, 3, 7);
}

double float8_e5m2(uint8_t code) {
  if ((code & 127) > 124) return std::numeric_limits<double>::quiet_NaN();
  if ((code & 127) < 124) return finite(code, 2, 15);
  const double infinity = std::numeric_limits<double>::infinity();
  return code >> 7 != 0 ? -infinity : infinity;
}

Eigen::RowVectorXd read_row_or_codes(const TensorView& tensor, int64_t offset, int64_t count) {
  const auto decode = [&](auto value_of) -> Eigen::RowVectorXd {
    const auto* codes = tensor.as<const uint8_t>() + offset;
    return Eigen::RowVectorXd::NullaryExpr(count, [&](int64_t i) { return value_of(codes[i]); });
  };
  switch (tensor.dtype) {
    case DType::float8_e4m3fn:
      return decode(float8_e4m3fn);
    case DType::float8_e5m2:
      return decode(float8_e5m2);
    case DType::int8:
      return decode([](uint8_t code) { return static_cast<double>(static_cast<int8_t>(code)); });
    default:
      return read_row(tensor, offset, count);
  }
}

}  // namespace cpattn::reference
