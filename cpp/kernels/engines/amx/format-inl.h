// SPDX-License-Identifier: Apache-2.0
#pragma once

// Turns elements into bfloat16, the only operands that tiles multiply. Needs
// vector/avx512-inl.h included first.
//
// bfloat16 is used as it is. float16 has 11 significant bits, bfloat16 8: a float16 becomes the sum
// of two parts, the nearest bfloat16 and the rest, which is exact and below 2^-8 of it. Three of
// the four products of two such numbers are computed; without the product of the rests the result
// is exact to 2^-16. The weights of attention may also be such sums if the values have one part.
#include "kernels/softmax/exp2_avx512-inl.h"
#include "kernels/vector/elements-inl.h"

namespace cpattn::kernels {
namespace {

/// bfloat16 in memory, for loops that do not round the weights to it.
struct PreciseBfloat16 : Bfloat16 {};

/// Writes thirty-two numbers as sums of two parts: `nearest`, the rounded numbers, and the rests.
inline void split_in_two(Vector a, Vector b, __m512i nearest, __m512i* parts) {
  const auto widened = [](__m256i bits) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
  };
  const Vector rest_a = sub(a, widened(_mm512_castsi512_si256(nearest)));
  const Vector rest_b = sub(b, widened(_mm512_extracti64x4_epi64(nearest, 1)));
  parts[0] = nearest;
  parts[1] = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(rest_b, rest_a));
}

/// Elements of type T, and weights of values of type T, as operands of tiles: each is a sum of
/// kParts or kWeightParts parts. Precise is the type that rounds no weights.
template <class T>
struct TileFormat;

template <>
struct TileFormat<Bfloat16> {
  using Precise = PreciseBfloat16;
  static constexpr int kParts = 1;
  static constexpr int kWeightParts = 1;
  static constexpr int kProducts = 1;
  static constexpr int16_t kInfinity = 0x7f80;
  /// Sums of probabilities are products with ones, of the rounded probabilities like P V.
  static constexpr bool kSumsByProducts = true;
  static constexpr bool kHidesNan = true;
  using Exponential = RoundedExp2;

  /// 2^x and 2^y of sixteen keys and the sixteen after them.
  [[gnu::always_inline]] static void probabilities(
      const Exponential& exp2, Vector x, Vector y, __m512i* parts
  ) {
    parts[0] = _mm512_packus_epi32(exp2(x), exp2(y));
  }

  /// The word of a row of probabilities that belongs to one of its 32 keys: vpackusdw works
  /// within quarters of a register.
  static int word_of(int key) { return key % 16 / 4 * 8 + key / 16 * 4 + key % 4; }

  static void split(__m512i elements, __m512i* parts) { parts[0] = elements; }

  /// Sixteen numbers and sixteen more, rounded.
  static void split(Vector a, Vector b, __m512i* parts) {
    parts[0] = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(b, a));
  }
};

template <>
struct TileFormat<PreciseBfloat16> {
  static constexpr int kParts = 1;
  static constexpr int kWeightParts = 2;
  static constexpr int kProducts = 1;
  static constexpr int16_t kInfinity = TileFormat<Bfloat16>::kInfinity;
  static constexpr bool kSumsByProducts = false;
  static constexpr bool kHidesNan = false;
  using Exponential = ExactExp2;

  [[gnu::always_inline]] static void probabilities(
      const Exponential& exp2, Vector x, Vector y, __m512i* parts
  ) {
    split(exp2(x), exp2(y), parts);
  }
  static int word_of(int key) { return key; }

  static void split(__m512i elements, __m512i* parts) { parts[0] = elements; }

  static void split(Vector a, Vector b, __m512i* parts) {
    split_in_two(a, b, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(b, a)), parts);
  }
};

template <>
struct TileFormat<Half> {
  using Precise = Half;
  static constexpr int kParts = 2;
  static constexpr int kWeightParts = 2;
  static constexpr int kProducts = 3;
  static constexpr int16_t kInfinity = 0x7c00;
  static constexpr bool kSumsByProducts = false;
  static constexpr bool kHidesNan = false;
  using Exponential = ExactExp2;

  [[gnu::always_inline]] static void probabilities(
      const Exponential& exp2, Vector x, Vector y, __m512i* parts
  ) {
    split(exp2(x), exp2(y), parts);
  }
  static int word_of(int key) { return key; }

  static void split(__m512i elements, __m512i* parts) {
    split(
        _mm512_cvtph_ps(_mm512_castsi512_si256(elements)),
        _mm512_cvtph_ps(_mm512_extracti64x4_epi64(elements, 1)), parts
    );
  }

  /// Sixteen numbers and sixteen more, to 16 bits each. The first part of an
  /// infinity is finite and its rest infinite: rests may be zero or of the other sign, so their
  /// product with an infinite first part would be NaN or have the wrong sign.
  static void split(Vector a, Vector b, __m512i* parts) {
    const __m512bh first = _mm512_cvtne2ps_pbh(bounded(b), bounded(a));
    split_in_two(a, b, reinterpret_cast<__m512i>(first), parts);
  }

 private:
  /// The largest float16 is 65504; NaN becomes 65536.
  static Vector bounded(Vector x) {
    constexpr int kSmallerMagnitude = 2;
    return _mm512_range_ps(x, splat(65536.0F), kSmallerMagnitude);
  }
};

}  // namespace
}  // namespace cpattn::kernels
