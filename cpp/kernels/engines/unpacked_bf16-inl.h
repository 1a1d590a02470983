// SPDX-License-Identifier: Apache-2.0
#pragma once

// Unpacked bfloat16 keys and values for vdpbf16ps. Needs the vector layer
// included first.
#include "kernels/engines/gemm_bf16-inl.h"
#include "kernels/engines/unpacked-inl.h"

namespace cpattn::kernels {
namespace {

template <>
struct InPlace<Bfloat16, Bfloat16Engine> {
  static constexpr bool kWidens = false;
  static __m512bh load_quad(const Bfloat16* p) {
    return reinterpret_cast<__m512bh>(kernels::load_quad(reinterpret_cast<const float*>(p)));
  }

  /// Two vectors of columns are made from one load of each value; for a single last vector only
  /// half a load is readable.
  template <int kVectors>
  static void load_values(const char* const* rows, int d, __m512bh* columns) {
#pragma GCC unroll 2
    for (int j = 0; j + 2 <= kVectors; j += 2) {
      const __m512i even = _mm512_loadu_si512(rows[0] + (d + j * kLanes) * 2);
      const __m512i odd = _mm512_loadu_si512(rows[1] + (d + j * kLanes) * 2);
      columns[j] = pairs(even, odd, 0);
      columns[j + 1] = pairs(even, odd, kLanes);
    }
    if constexpr (kVectors % 2 == 1) {
      const char* last = rows[0] + (d + (kVectors - 1) * kLanes) * 2;
      const char* next = rows[1] + (d + (kVectors - 1) * kLanes) * 2;
      columns[kVectors - 1] =
          pairs(_mm512_maskz_loadu_epi32(0x00ff, last), _mm512_maskz_loadu_epi32(0x00ff, next), 0);
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
