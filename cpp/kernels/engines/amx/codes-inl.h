// SPDX-License-Identifier: Apache-2.0
#pragma once

// 8-bit codes as tiles of bfloat16, which represents the numbers of all codes exactly. Needs
// vector/avx512-inl.h and the tiles included first, and AVX512_VBMI.
//
// A code becomes the two bytes of its bfloat16, each looked up in a table of 128 by the code's bits
// without the sign. Bytes of 64 codes are looked up at a time and then interleaved.
#include "kernels/engines/amx/pack-inl.h"

namespace cpattn::kernels {
namespace {

/// The bits of a number that bfloat16 represents exactly.
constexpr uint16_t bfloat16_bits(float x) {
  return static_cast<uint16_t>(__builtin_bit_cast(uint32_t, x) >> 16);
}

/// The number of an unsigned float8 code with `fraction_bits` bits of fraction. Not used for
/// infinities and NaN.
constexpr float float8_number(int code, int fraction_bits, int bias) {
  const int exponent = code >> fraction_bits;
  const int fraction = code & ((1 << fraction_bits) - 1);
  auto number = static_cast<float>(exponent == 0 ? fraction : fraction + (1 << fraction_bits));
  int power = (exponent == 0 ? 1 : exponent) - bias - fraction_bits;
  for (; power > 0; --power) number *= 2;
  for (; power < 0; ++power) number /= 2;
  return number;
}

/// The numbers of a type's codes, as bfloat16, and kNotFinite, the first code without a finite one.
template <class Code>
constexpr uint16_t code_bits(int code);
template <>
constexpr uint16_t code_bits<Float8>(int code) {
  return code == 127 ? 0x7fc0 : bfloat16_bits(float8_number(code, 3, 7));
}
template <>
constexpr uint16_t code_bits<Float8E5M2>(int code) {
  if (code >= 124) return code == 124 ? 0x7f80 : 0x7fc0;
  return bfloat16_bits(float8_number(code, 2, 15));
}
template <>
constexpr uint16_t code_bits<int8_t>(int code) {
  return bfloat16_bits(static_cast<float>(code));
}
template <class Code>
constexpr int kNotFinite = 256;
template <>
constexpr int kNotFinite<Float8> = 127;
template <>
constexpr int kNotFinite<Float8E5M2> = 124;

template <class Code>
struct CodeBytes {
  alignas(64) uint8_t high[128] = {};
  alignas(64) uint8_t low[128] = {};
  constexpr CodeBytes() {
    for (int code = 0; code < 128; ++code) {
      high[code] = static_cast<uint8_t>(code_bits<Code>(code) >> 8);
      low[code] = static_cast<uint8_t>(code_bits<Code>(code) & 0xff);
    }
  }
};
template <class Code>
constexpr CodeBytes<Code> kCodeBytes;

template <class Code>
class CodeExpander {
 public:
  /// The high and the low bytes of 64 codes.
  [[gnu::always_inline]] void operator()(__m512i codes, __m512i& high, __m512i& low) const {
    __m512i index = codes;
    if constexpr (kNotFinite<Code> == 256) index = _mm512_abs_epi8(codes);
    high = _mm512_permutex2var_epi8(high_[0], index, high_[1]);
    low = _mm512_permutex2var_epi8(low_[0], index, low_[1]);
    if constexpr (kNotFinite<Code> == 256) {
      // 128, of which the table sees the lower bits, is 0x4300.
      const __mmask64 least = _mm512_cmpeq_epi8_mask(codes, sign_);
      high = _mm512_mask_mov_epi8(high, least, _mm512_set1_epi8(0x43));
    }
    high = _mm512_ternarylogic_epi32(high, codes, sign_, 0xf8);  // a | b & c
  }

  /// Whether all of 64 codes stand for finite numbers.
  [[gnu::always_inline]] bool finite(__m512i codes) const {
    if constexpr (kNotFinite<Code> == 256) {
      return true;
    } else {
      const __m512i size = _mm512_andnot_si512(sign_, codes);
      return _mm512_cmpge_epu8_mask(size, _mm512_set1_epi8(kNotFinite<Code>)) == 0;
    }
  }

 private:
  __m512i high_[2] = {
      _mm512_load_si512(kCodeBytes<Code>.high), _mm512_load_si512(kCodeBytes<Code>.high + 64)
  };
  __m512i low_[2] = {
      _mm512_load_si512(kCodeBytes<Code>.low), _mm512_load_si512(kCodeBytes<Code>.low + 64)
  };
  __m512i sign_ = _mm512_set1_epi8(INT8_MIN);
};

/// Whether the functions below take rows of `dim` codes, from dimension `first` on.
inline bool takes_codes(int dim, int first) { return dim % 64 == 0 && first % 32 == 0; }

/// pack_tile_rows() for codes. Returns whether all of them stand for finite numbers.
template <class Code, int kRows = 2 * kTileRows, class Each>
bool pack_code_rows(
    const char* const* rows, int dim, int first, int depth, Bfloat16* tiles, Each each
) {
  const CodeExpander<Code> expander;
  // The order of 64 codes in which unpack takes the first eight of every sixteen for a row of the
  // first tile and the other eight for a row of the second.
  alignas(64) constexpr auto kOrder = [] {
    struct {
      uint8_t bytes[64];
    } order{};
    for (int i = 0; i < 64; ++i) {
      order.bytes[i] = static_cast<uint8_t>(i / 16 * 8 + i % 8 + i / 8 % 2 * 32);
    }
    return order;
  }();
  const __m512i order = _mm512_loadu_si512(kOrder.bytes);
  bool finite = true;
  for (int row = 0; row < kRows; row += 4) {
    Bfloat16* cells = tiles + int64_t{row / kTileRows} * kTileRows * depth + row % kTileRows * 32;
    for (int d = 0; d < dim; d += 64) {
      __m512i codes[4][1];
      load_four_rows(rows + row, d, codes);
      for (int i = 0; i < 4; ++i) {
        finite &= expander.finite(codes[i][0]);
        __m512i high, low;
        expander(_mm512_permutexvar_epi8(order, codes[i][0]), high, low);
        Bfloat16* cell = cells + (first + d) / kTileDepth * kTileElements + i * kTileDepth;
        _mm512_store_si512(cell, _mm512_unpacklo_epi8(low, high));
        _mm512_store_si512(cell + kTileElements, _mm512_unpackhi_epi8(low, high));
      }
    }
    each();
  }
  return finite;
}

/// pack_tile_values() for codes.
template <class Code, class Each>
int pack_code_values(
    const char* const* rows,
    int n,
    int dim,
    Bfloat16* tiles,
    int64_t column_stride,
    int* not_finite,
    Each each
) {
  const CodeExpander<Code> expander;
  // Unpacking bytes of two rows, and then words, works within quarters of a register: this order of
  // 32-bit words brings sixteen neighbouring dimensions into the quarters of one.
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  int count = 0;
  for (int key = 0; key < kTileDepth; key += 4) {
    const char* four[4];
    for (int i = 0; i < 4; ++i) four[i] = key + i < n ? rows[key + i] : kZeroRow;
    bool finite[4] = {true, true, true, true};
    for (int d = 0; d < dim; d += 64) {
      __m512i codes[4][1];
      load_four_rows(four, d, codes);
      for (int i = 0; i < 4; ++i) finite[i] &= expander.finite(codes[i][0]);
      for (int pair = 0; pair < 4; pair += 2) {
        const __m512i even = _mm512_permutexvar_epi32(order, codes[pair][0]);
        const __m512i odd = _mm512_permutexvar_epi32(order, codes[pair + 1][0]);
        Bfloat16* cell =
            tiles + d / 16 * column_stride + TileFormat<Bfloat16>::word_of(key + pair) * 16;
        const auto place = [&](__m512i both) __attribute__((always_inline)) {
          __m512i high, low;
          expander(both, high, low);
          _mm512_store_si512(cell, _mm512_unpacklo_epi8(low, high));
          _mm512_store_si512(cell + column_stride, _mm512_unpackhi_epi8(low, high));
          cell += 2 * column_stride;
        };
        place(_mm512_unpacklo_epi8(even, odd));
        place(_mm512_unpackhi_epi8(even, odd));
      }
    }
    for (int i = 0; i < 4; ++i) {
      if (!finite[i]) not_finite[count++] = key + i;
    }
    each();
  }
  return count;
}

}  // namespace
}  // namespace cpattn::kernels
