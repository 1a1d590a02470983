// SPDX-License-Identifier: Apache-2.0
#pragma once

// Matrix products in bfloat16 with vdpbf16ps: two rows of a panel are
// interleaved, so that one 32-bit lane holds a column's pair.
#include "kernels/engines/gemm-inl.h"

namespace cpattn::kernels {
namespace {

inline void store_probabilities(Bfloat16* p, Vector a, Vector b) {
  _mm512_storeu_si512(p, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(b, a)));
}

/// Loads dimensions [d, d + 32) below `dim` of the sixteen keys from `key` on, zeros for keys from
/// n on: block[i] holds pair i of every key. Returns the number of pairs.
inline int load_key_pairs(const char* const* rows, int key, int n, int d, int dim, __m512i* block) {
  const bool half = dim - d < 32;
  const __mmask16 present = half ? 0x00ff : 0xffff;
  for (int i = 0; i < 16; ++i) {
    block[i] = key + i < n ? _mm512_maskz_loadu_epi32(present, rows[key + i] + d * 2)
                           : _mm512_setzero_si512();
  }
  transpose(block);
  return half ? 8 : 16;
}

/// Picks elements first, first + 1, ... of two vectors in turn.
inline __m512i interleaved(int first) {
  int16_t indices[32];
  for (int i = 0; i < 32; ++i) indices[i] = static_cast<int16_t>(first + i / 2 + i % 2 * 32);
  return _mm512_loadu_si512(indices);
}

struct Bfloat16Engine : Bfloat16Pairs {
  using Pack = __m512bh;
  static Pack load_columns(const Bfloat16* p) {
    return reinterpret_cast<Pack>(_mm512_loadu_si512(p));
  }
  static Pack splat_row(const Bfloat16* p) {
    int32_t pair;
    __builtin_memcpy(&pair, p, sizeof pair);
    return reinterpret_cast<Pack>(_mm512_set1_epi32(pair));
  }
  static Vector multiply_add(Pack a, Pack b, Vector sum) { return _mm512_dpbf16_ps(sum, a, b); }

  template <class T>
  static void pack_keys(
      const char* const* rows,
      int begin,
      int end,
      int dim,
      int first_row,
      int64_t panel_size,
      Bfloat16* panels
  ) {
    for (int key = begin; key < round_up(end, kKeyGranule); key += 16) {
      Bfloat16* panel =
          panels + key / kPanel * panel_size + int64_t{first_row} * kPanel + key % kPanel * 2;
      for (int d = 0; d < dim; d += 32) {
        fetch_ahead(rows, key, 16, d * 2);
        __m512i block[16];
        const int pairs = load_key_pairs(rows, key, end, d, dim, block);
        for (int i = 0; i < pairs; ++i) {
          _mm512_storeu_si512(panel + int64_t{d / 2 + i} * 2 * kPanel, block[i]);
        }
      }
    }
  }

  template <class T>
  static int pack_values(
      const char* const* rows,
      int begin,
      int end,
      int dim,
      int64_t panel_size,
      Bfloat16* panels,
      int* not_finite
  ) {
    // Orders that take elements of two rows in turn: elements 0 to 15, and elements from 16 on.
    const __m512i order = interleaved(0);
    const __m512i upper_order = interleaved(16);
    int count = 0;
    for (int key = begin; key < round_up(end, kKeyGranule); key += 2) {
      __m512i largest[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
      for (int d = 0; d < dim; d += 32) {
        fetch_ahead(rows, key, 2, d * 2);
        const bool half = dim - d < 32;
        __m512i x[2];
        for (int i = 0; i < 2; ++i) {
          x[i] = key + i < end
                     ? _mm512_maskz_loadu_epi32(half ? 0x00ff : 0xffff, rows[key + i] + d * 2)
                     : _mm512_setzero_si512();
          largest[i] = _mm512_max_epu16(largest[i], _mm512_add_epi16(x[i], x[i]));  // less the sign
        }
        Bfloat16* cell = panels + d / kPanel * panel_size + int64_t{key} * kPanel + d % kPanel * 2;
        _mm512_storeu_si512(cell, _mm512_permutex2var_epi16(x[0], order, x[1]));
        if (!half) {
          _mm512_storeu_si512(cell + 32, _mm512_permutex2var_epi16(x[0], upper_order, x[1]));
        }
      }
      for (int i = 0; i < 2; ++i) {
        const __m512i infinity = _mm512_set1_epi16(static_cast<int16_t>(0xff00));
        if (_mm512_cmpge_epu16_mask(largest[i], infinity) != 0) not_finite[count++] = key + i;
      }
    }
    return count;
  }
};

}  // namespace
}  // namespace cpattn::kernels
