// SPDX-License-Identifier: Apache-2.0
#pragma once

// Scores of int8 with vpdpbusd: four rows of a panel are interleaved, so that one
// 32-bit lane holds four dimensions of a key. Needs the vector layer included first.
#include "kernels/engines/gemm-inl.h"

namespace cpattn::kernels {
namespace {

/// The instruction takes one unsigned operand: queries are stored with 128 added, and the sums of a
/// key start at -128 times the sum of its dimensions.
struct Int8Engine {
  using Operand = int8_t;
  using Pack = __m512i;
  using Sum = __m512i;
  static constexpr int kDepthStep = 4;
  static constexpr int kStartRows = 4;  // rows of a panel with the starts of sums

  static Pack load_columns(const int8_t* p) { return _mm512_loadu_si512(p); }
  static Pack splat_row(const int8_t* p) {
    int32_t four;
    __builtin_memcpy(&four, p, sizeof four);
    return _mm512_set1_epi32(four);
  }
  /// Adds products to sums. It is assembly because GCC 12 copies every sum before and after the
  /// intrinsic.
  static Sum multiply_add(Pack query, Pack keys, Sum sum) {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(query), "v"(keys));
    return sum;
  }
  static Sum start(const int8_t* p) { return _mm512_loadu_si512(p); }
  static Vector value(Sum sum) { return _mm512_cvtepi32_ps(sum); }

  template <class T>
  static void pack_query(const int8_t* source, int dim, int8_t* row) {
    for (int d = 0; d < dim; ++d) row[d] = static_cast<int8_t>(source[d] ^ 0x80);
  }

  template <class T>
  static void pack_keys(
      const char* const* rows,
      int begin,
      int end,
      int dim,
      int first_row,
      int64_t panel_size,
      int8_t* panels
  ) {
    for (int key = begin; key < round_up(end, kKeyGranule); key += 16) {
      int8_t* panel =
          panels + key / kPanel * panel_size + int64_t{first_row} * kPanel + key % kPanel * 4;
      __m512i offset = _mm512_setzero_si512();
      for (int d = 0; d < dim; d += 64, panel += 64 * kPanel) {
        fetch_ahead(rows, key, 16, d);
        const int fours = dim - d < 64 ? (dim - d) / 4 : 16;
        const auto present = static_cast<__mmask16>((1U << fours) - 1);
        __m512i block[16];
        for (int i = 0; i < 16; ++i) {
          block[i] = key + i < end ? _mm512_maskz_loadu_epi32(present, rows[key + i] + d)
                                   : _mm512_setzero_si512();
        }
        transpose(block);
        for (int i = 0; i < fours; ++i) {
          offset = _mm512_dpbusd_epi32(offset, _mm512_set1_epi8(INT8_MIN), block[i]);
          _mm512_storeu_si512(panel + int64_t{i} * 4 * kPanel, block[i]);
        }
      }
      panel = panels + key / kPanel * panel_size + int64_t{dim} * kPanel + key % kPanel * 4;
      _mm512_storeu_si512(panel, _mm512_sub_epi32(_mm512_setzero_si512(), offset));
    }
  }
};

}  // namespace
}  // namespace cpattn::kernels
