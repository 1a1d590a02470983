// SPDX-License-Identifier: Apache-2.0
#pragma once

// The vector layer of AVX-512 F/BW/DQ/VL: sixteen lanes. contract-inl.h has the contract of its
// functions.
#include <immintrin.h>
#include <stdint.h>

#include "kernels/vector/elements-inl.h"

namespace cpattn::kernels {
namespace {

using Vector = __m512;
constexpr int kLanes = 16;
/// Columns of one packed panel, in vectors: 6 x 4 accumulators fill the registers.
constexpr int kPanelVectors = 4;

inline Vector splat(float x) { return _mm512_set1_ps(x); }
inline Vector load(const float* p) { return _mm512_loadu_ps(p); }
inline Vector load(const Half* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline Vector load(const Bfloat16* p) {
  const __m512i wide =
      _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
inline Vector load(const Float8* p) {
  const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  // The code is read as float16, whose exponent is then too small by 8. Bit 14 repeats the sign
  // and is cleared; adding 0x80 sets it again only for NaN, which makes a NaN of float16.
  const __m256i half = _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(~0x4000));
  const __m256i nan =
      _mm256_and_si256(_mm256_add_epi16(half, _mm256_set1_epi16(0x80)), _mm256_set1_epi16(0x4000));
  return _mm512_mul_ps(_mm512_cvtph_ps(_mm256_or_si256(half, nan)), _mm512_set1_ps(256.0F));
}
inline Vector load(const Float8E5M2* p) {
  const __m256i wide = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return _mm512_cvtph_ps(_mm256_slli_epi16(wide, 8));
}
/// Loads two vectors of codes as float32, with two thirds of the work of two loads.
inline void load_two(const Float8* p, Vector& first, Vector& second) {
  const __m512i wide =
      _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  const __m512i half = _mm512_and_si512(_mm512_slli_epi16(wide, 7), _mm512_set1_epi16(~0x4000));
  const __m512i above = _mm512_add_epi16(half, _mm512_set1_epi16(0x80));
  const __m512i nan = _mm512_set1_epi16(0x4000);
  const __m512i bits = _mm512_ternarylogic_epi32(half, above, nan, 0xf8);  // a | b & c
  const Vector scale = _mm512_set1_ps(256.0F);
  first = _mm512_mul_ps(_mm512_cvtph_ps(_mm512_castsi512_si256(bits)), scale);
  second = _mm512_mul_ps(_mm512_cvtph_ps(_mm512_extracti64x4_epi64(bits, 1)), scale);
}
inline Vector load(const int8_t* p) {
  return _mm512_cvtepi32_ps(
      _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))
  );
}
inline void store(float* p, Vector x) { _mm512_storeu_ps(p, x); }
inline void store(Half* p, Vector x) {
  _mm256_storeu_si256(
      reinterpret_cast<__m256i*>(p),
      _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)
  );
}
inline void store(Bfloat16* p, Vector x) {
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i bias = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
  const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, bias), 16);
  const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  const __m512i safe = _mm512_mask_set1_epi32(rounded, nan, 0x7fc0);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(safe));
}
inline void store(Float8* p, Vector x) {
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i size = _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff));
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 20), _mm512_set1_epi32(1));
  const __m512i bias = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7ffff - (120 << 23)));
  const __m512i normal = _mm512_srli_epi32(_mm512_add_epi32(size, bias), 20);
  // Adding 2^14 shifts a subnormal's bits to the bottom, rounded to even.
  const __m512i magic = _mm512_set1_epi32(0x46800000);
  const __m512i shifted =
      _mm512_castps_si512(_mm512_add_ps(_mm512_castsi512_ps(size), _mm512_castsi512_ps(magic)));
  const __mmask16 subnormal = _mm512_cmplt_epi32_mask(size, _mm512_set1_epi32(0x3c800000));
  const __m512i code = _mm512_mask_sub_epi32(normal, subnormal, shifted, magic);
  const __m512i sign = _mm512_and_si512(_mm512_srli_epi32(bits, 24), _mm512_set1_epi32(0x80));
  const __m512i signed_code = _mm512_or_si512(code, sign);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(signed_code));
}
inline void store(Float8E5M2* p, Vector x) {
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i any_size = _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff));
  const __mmask16 nan = _mm512_cmpgt_epi32_mask(any_size, _mm512_set1_epi32(0x7f800000));
  // Numbers from 2^16 on become infinities: 2^16 gets their code by the rule of normal numbers.
  const __m512i size = _mm512_min_epi32(any_size, _mm512_set1_epi32(0x47800000));
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(size, 21), _mm512_set1_epi32(1));
  const __m512i bias = _mm512_add_epi32(odd, _mm512_set1_epi32(0xfffff - (112 << 23)));
  const __m512i normal = _mm512_srli_epi32(_mm512_add_epi32(size, bias), 21);
  // Adding 2^7 shifts a subnormal's bits to the bottom, rounded to even.
  const __m512i magic = _mm512_set1_epi32(0x43000000);
  const __m512i shifted =
      _mm512_castps_si512(_mm512_add_ps(_mm512_castsi512_ps(size), _mm512_castsi512_ps(magic)));
  const __mmask16 subnormal = _mm512_cmplt_epi32_mask(size, _mm512_set1_epi32(0x38800000));
  const __m512i number = _mm512_mask_sub_epi32(normal, subnormal, shifted, magic);
  const __m512i code = _mm512_mask_set1_epi32(number, nan, 0x7f);
  const __m512i sign = _mm512_and_si512(_mm512_srli_epi32(bits, 24), _mm512_set1_epi32(0x80));
  const __m512i signed_code = _mm512_or_si512(code, sign);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(signed_code));
}
inline void store(int8_t* p, Vector x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x)));
}

inline Vector add(Vector a, Vector b) { return _mm512_add_ps(a, b); }
inline Vector sub(Vector a, Vector b) { return _mm512_sub_ps(a, b); }
inline Vector mul(Vector a, Vector b) { return _mm512_mul_ps(a, b); }
inline Vector div(Vector a, Vector b) { return _mm512_div_ps(a, b); }
inline Vector fma(Vector a, Vector b, Vector c) { return _mm512_fmadd_ps(a, b, c); }
inline Vector max(Vector a, Vector b) { return _mm512_max_ps(a, b); }
inline Vector min(Vector a, Vector b) { return _mm512_min_ps(a, b); }
inline float reduce_add(Vector x) { return _mm512_reduce_add_ps(x); }
inline float reduce_max(Vector x) { return _mm512_reduce_max_ps(x); }

/// Splits x into an exponent for scale_by_power and the rest in [0, 1], which is 0
/// for infinities.
inline Vector split_exponent(Vector x, Vector& rest) {
  rest = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  return x;
}
/// x * 2^exponent, which vscalefps rounds down to an integer itself; it underflows gradually. A NaN
/// is kept, because it is not less than the least exponent.
inline Vector scale_by_power(Vector x, Vector exponent) {
  const __mmask16 kept = _mm512_cmp_ps_mask(exponent, _mm512_set1_ps(kLeastExponent), _CMP_NLT_UQ);
  return _mm512_maskz_scalef_ps(kept, x, exponent);
}

inline Vector select(uint32_t bits, Vector x, Vector other) {
  return _mm512_mask_mov_ps(other, static_cast<__mmask16>(bits), x);
}

/// 16 x 16 transpose of 32-bit elements.
inline void transpose(__m512i* r) {
  __m512i t[16];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
    r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
  }
}
inline void transpose(Vector* r) {
  __m512i bits[16];
  for (int i = 0; i < 16; ++i) bits[i] = _mm512_castps_si512(r[i]);
  transpose(bits);
  for (int i = 0; i < 16; ++i) r[i] = _mm512_castsi512_ps(bits[i]);
}

template <int kDistance>
inline Vector exchange(Vector x) {
  if constexpr (kDistance == 1) return _mm512_permute_ps(x, 0xb1);
  if constexpr (kDistance == 2) return _mm512_permute_ps(x, 0x4e);
  if constexpr (kDistance == 4) return _mm512_shuffle_f32x4(x, x, 0xb1);
  return _mm512_shuffle_f32x4(x, x, 0x4e);
}

inline Vector load_quad(const float* p) { return _mm512_broadcast_f32x4(_mm_loadu_ps(p)); }

inline Vector sums_of_quads(Vector a, Vector b, Vector c, Vector d) {
  const __m512d ab = _mm512_castps_pd(add(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)));
  const __m512d cd = _mm512_castps_pd(add(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d)));
  return add(
      _mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd)), _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd))
  );
}

/// The bits, as bfloat16, of every e4m3fn code without a sign.
struct CodeTable {
  alignas(64) uint16_t bits[128] = {};
  constexpr CodeTable() {
    for (int code = 1; code < 127; ++code) {
      int normal = code;
      int exponent = 120;
      for (; normal < 8; normal *= 2) --exponent;
      bits[code] = static_cast<uint16_t>((exponent << 7) + (normal << 4));
    }
    bits[127] = 0x7fc0;
  }
};
constexpr CodeTable kCodeTable;

/// Returns 32 codes as bfloat16, exact.
inline __m512i expand(__m256i codes) {
  const __m512i wide = _mm512_cvtepu8_epi16(codes);
  const auto look_up = [wide](int first) {
    return _mm512_permutex2var_epi16(
        _mm512_load_si512(kCodeTable.bits + first), wide,
        _mm512_load_si512(kCodeTable.bits + first + 32)
    );
  };
  const __mmask32 upper = _mm512_test_epi16_mask(wide, _mm512_set1_epi16(0x40));
  const __m512i size = _mm512_mask_mov_epi16(look_up(0), upper, look_up(64));
  const __m512i sign = _mm512_set1_epi16(INT16_MIN);
  return _mm512_ternarylogic_epi32(size, _mm512_slli_epi16(wide, 8), sign, 0xf8);  // a | b & c
}

constexpr int kCodes = 32;
inline void expand(const Float8* p, Bfloat16* out) {
  _mm512_storeu_si512(out, expand(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
}
inline void expand(const Float8* p, Vector scale, Bfloat16* out) {
  const __m512i pairs = expand(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000U));
  // Rounds to the upper bits. NaN stays NaN: the table's has no low bits, and the NaN of a product
  // is the table's, the scale's or the processor's.
  const auto rounded = [scale](__m512i factor) {
    const __m512i bits = _mm512_castps_si512(_mm512_mul_ps(_mm512_castsi512_ps(factor), scale));
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    return _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  };
  const __m512i even = rounded(_mm512_slli_epi32(pairs, 16));
  const __m512i odd = rounded(_mm512_and_si512(pairs, upper));
  _mm512_storeu_si512(out, _mm512_mask_mov_epi16(_mm512_srli_epi32(even, 16), 0xaaaaaaaa, odd));
}

// Integers, comparisons and compression, for top-k selection.
using Integers = __m512i;

inline Integers load(const int32_t* p) { return _mm512_loadu_si512(p); }
inline void store(int32_t* p, Integers x) { _mm512_storeu_si512(p, x); }
inline Integers ascending(int32_t first) {
  const Integers lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  return _mm512_add_epi32(_mm512_set1_epi32(first), lane);
}
inline int32_t reduce_add(Integers x) { return _mm512_reduce_add_epi32(x); }

inline uint32_t greater(Vector a, Vector b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
inline uint32_t greater_equal(Vector a, Vector b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
inline Integers count_greater(Integers counts, Vector a, Vector b) {
  const __mmask16 bits = _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ);
  return _mm512_mask_sub_epi32(counts, bits, counts, _mm512_set1_epi32(-1));
}
inline Vector without_nan(Vector x) { return max(x, splat(-__builtin_inff())); }

// Avoids vcompressps to memory, which Zen 4 runs as microcode.
inline void store_compressed(float* p, uint32_t bits, Vector x) {
  store(p, _mm512_maskz_compress_ps(static_cast<__mmask16>(bits), x));
}
inline void store_compressed(int32_t* p, uint32_t bits, Integers x) {
  store(p, _mm512_maskz_compress_epi32(static_cast<__mmask16>(bits), x));
}

}  // namespace
}  // namespace cpattn::kernels
