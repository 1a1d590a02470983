// SPDX-License-Identifier: Apache-2.0
#pragma once

// Storage types of Q, K, V, out and quantised rows, and the least power of two. The types are
// distinct structs, so that overloads tell the formats apart.
#include <stdint.h>

namespace cpattn::kernels {
namespace {

/// Powers of two below 2^-100 count as 0. Float32 has smaller ones, but their products with values,
/// sums and rounding rests soon become subnormal, and each operation on subnormal numbers takes a
/// hundred times as long on many processors. Beside the largest weight of a row, which is 2^-7 or
/// more, they change no result.
constexpr float kLeastExponent = -100.0F;

struct Half {
  uint16_t bits;
};

struct Bfloat16 {
  uint16_t bits;
};

/// e4m3fn: no infinities, the largest number is 448, 0x7f and 0xff are NaN.
struct Float8 {
  uint8_t bits;
};

/// e5m2, the upper half of float16: 0x7c and 0xfc are infinities, the largest number is 57344.
struct Float8E5M2 {
  uint8_t bits;
};

}  // namespace
}  // namespace cpattn::kernels
