// SPDX-License-Identifier: Apache-2.0
#pragma once

// Unpacked keys and values of bfloat16, or of codes, for vdpbf16ps. Needs the vector layer
// included first.
#include "kernels/engines/gemm_bf16-inl.h"
#include "kernels/engines/unpacked-inl.h"

namespace cpattn::kernels {
namespace {

/// 32 numbers from p on, or 16, as bfloat16, which holds every number of an 8-bit format.
template <class Code>
__m512i load_numbers(const Code* p) {
  return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(load(p + kLanes), load(p)));
}
template <class Code>
__m512i load_half(const Code* p) {
  return _mm512_zextsi256_si512(reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(load(p))));
}
inline __m512i load_numbers(const Float8* p) {
  return expand(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline __m512i load_half(const Float8* p) {
  return expand(_mm256_zextsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
inline __m512i load_numbers(const Bfloat16* p) { return _mm512_loadu_si512(p); }
inline __m512i load_half(const Bfloat16* p) { return _mm512_maskz_loadu_epi32(0x00ff, p); }

template <class T>
struct InPlace<T, Bfloat16Engine> {
  static constexpr bool kWidens = sizeof(T) == 1;
  static void widen(const T* row, int dim, Bfloat16* operands) {
    int d = 0;
    for (; d + 2 * kLanes <= dim; d += 2 * kLanes) {
      _mm512_storeu_si512(operands + d, load_numbers(row + d));
    }
    if (d < dim) _mm512_mask_storeu_epi32(operands + d, 0x00ff, load_half(row + d));
  }
  static __m512bh load_quad(const Bfloat16* p) {
    return reinterpret_cast<__m512bh>(kernels::load_quad(reinterpret_cast<const float*>(p)));
  }

  /// Two vectors of columns are made from one load of each value; for a single last vector only
  /// half a load is readable.
  template <int kVectors>
  static void load_values(const char* const* rows, int d, __m512bh* columns) {
    const T* even = reinterpret_cast<const T*>(rows[0]) + d;
    const T* odd = reinterpret_cast<const T*>(rows[1]) + d;
#pragma GCC unroll 2
    for (int j = 0; j + 2 <= kVectors; j += 2) {
      const __m512i first = load_numbers(even + j * kLanes);
      const __m512i second = load_numbers(odd + j * kLanes);
      columns[j] = pairs(first, second, 0);
      columns[j + 1] = pairs(first, second, kLanes);
    }
    if constexpr (kVectors % 2 == 1) {
      constexpr int kLast = (kVectors - 1) * kLanes;
      columns[kVectors - 1] = pairs(load_half(even + kLast), load_half(odd + kLast), 0);
    }
  }

 private:
  /// Elements [first, first + 16) of both, alternating.
  static __m512bh pairs(__m512i even, __m512i odd, int first) {
    // Lane i takes words first + i of the first source and, 32 further, of the second.
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i words = _mm512_add_epi32(
        _mm512_or_si512(lane, _mm512_slli_epi32(lane, 16)),
        _mm512_set1_epi32(first | (first + 32) << 16)
    );
    return reinterpret_cast<__m512bh>(_mm512_permutex2var_epi16(even, words, odd));
  }
};

}  // namespace
}  // namespace cpattn::kernels
