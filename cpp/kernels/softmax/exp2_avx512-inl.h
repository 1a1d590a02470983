// SPDX-License-Identifier: Apache-2.0
#pragma once

// 2^x for the softmax on tiles, which runs beside products. There only one port multiplies, and
// every instruction lowers the clock. Needs vector/avx512-inl.h included first.
//
// GCC 12 loads constants again after every assembly statement between two slices
// of this work. The objects here hold them in registers.

namespace cpattn::kernels {
namespace {

/// Tells the compiler that a constant may have changed, so that it has to keep it.
inline void pin(Vector& x) { __asm__("" : "+v"(x)); }
inline void pin(__m512i& x) { __asm__("" : "+v"(x)); }

/// 2^(i / 16).
alignas(64) constexpr float kSixteenths[] = {
    1.0F,        1.04427373F, 1.09050775F, 1.13878858F, 1.18920708F, 1.24185777F,
    1.29683959F, 1.35425556F, 1.41421354F, 1.47682619F, 1.54221082F, 1.61049032F,
    1.68179286F, 1.75625217F, 1.8340081F,  1.91520655F,
};

/// 2^x to 5.4e-7 for any x from the least exponent on: 0 below it, +inf for +inf. A shuffle looks
/// up the sixteenths of x, and a quadratic computes the rest: five operations on the busy port
/// instead of the six of exp2_less_half<4>.
class ExactExp2 {
 public:
  ExactExp2() {
    pin(sixteenths_);
    pin(to_index_);
    pin(quadratic_);
    pin(linear_);
  }

  [[gnu::always_inline]] Vector operator()(Vector x) const {
    constexpr int kToSixteenths = 4 << 4 | _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    const Vector rest = _mm512_reduce_ps(x, kToSixteenths);  // 0 for an infinity
    // A float of this size has its sixteenths in the lowest four bits.
    const __m512i index = _mm512_castps_si512(add(x, to_index_));
    const Vector power = _mm512_permutexvar_ps(index, sixteenths_);
    const Vector slope = fma(rest, quadratic_, linear_);
    // vscalefps takes the floor of the exponent.
    return scale_by_power(fma(mul(power, rest), slope, power), sub(x, rest));
  }

 private:
  Vector sixteenths_ = _mm512_load_ps(kSixteenths);
  Vector to_index_ = splat(0x1.8p19F);
  Vector quadratic_ = splat(0.240226433F);
  Vector linear_ = splat(0.693187714F);
};

/// 2^x rounded to the nearest bfloat16, as its bits: those of 2^n (1 + m) are
/// 128 (n + 127 + m). With n the floor of x and f = x - n they are 128 (x + 127) and
/// 128 times 2^f - 1 - f, which a cubic approximates to 8.6e-5 of 2^f: a fortieth of the rounding.
class RoundedExp2 {
 public:
  RoundedExp2() {
    pin(cubic_);
    pin(quadratic_);
    pin(linear_);
    pin(to_bits_);
    pin(bits_of_zero_);
  }

  /// The bits, in 32-bit elements: below 0 for 2^x below 2^-127 and for some NaN, above 0xffff for
  /// an infinity and the other NaN. Results below 2^-126 are subnormal and cost nothing: tiles
  /// count them as 0.
  [[gnu::always_inline]] __m512i operator()(Vector x) const {
    constexpr int kToOnes = _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC;
    const Vector fraction = _mm512_reduce_ps(x, kToOnes);  // 0 for an infinity
    const Vector y = fma(fma(fma(fraction, cubic_, quadratic_), fraction, linear_), fraction, x);
    // A float of this size has 1/128 in its lowest bit.
    return _mm512_sub_epi32(_mm512_castps_si512(add(y, to_bits_)), bits_of_zero_);
  }

 private:
  Vector cubic_ = splat(0.077067174F);
  Vector quadratic_ = splat(0.227644846F);
  Vector linear_ = splat(-0.304883182F);
  Vector to_bits_ = splat(0x1.8p16F + 127.0F);
  __m512i bits_of_zero_ = _mm512_castps_si512(splat(0x1.8p16F));
};

}  // namespace
}  // namespace cpattn::kernels
