// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "reference/rows.h"

namespace cpattn::reference {

/// Reads an e4m3fn code: sign, four bits of exponent with bias 7, three of mantissa. The largest
/// exponent is like the others, except that its last code is NaN.
double float8_e4m3fn(uint8_t code);

/// Reads an e5m2 code: sign, five bits of exponent with bias 15, two of mantissa. The largest
/// exponent is infinity and NaN, as in IEEE 754.
double float8_e5m2(uint8_t code);

/// read_row() of floats, or of codes of 8 bits: float8_e4m3fn, float8_e5m2 or int8.
Eigen::RowVectorXd read_row_or_codes(const TensorView& tensor, int64_t offset, int64_t count);

}  // namespace cpattn::reference
