// SPDX-License-Identifier: Apache-2.0
#pragma once

// The vector layer of AVX2 with FMA and F16C: eight lanes. contract-inl.h has the contract of its
// functions.
#include <immintrin.h>
#include <stdint.h>

#include "kernels/vector/elements-inl.h"

namespace cpattn::kernels {
namespace {

using Vector = __m256;
constexpr int kLanes = 8;
/// Columns of one packed panel, in vectors: 6 x 2 accumulators fill the registers.
constexpr int kPanelVectors = 2;

inline Vector splat(float x) { return _mm256_set1_ps(x); }
inline Vector load(const float* p) { return _mm256_loadu_ps(p); }
inline Vector load(const Half* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline Vector load(const Bfloat16* p) {
  const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
inline Vector load(const Float8* p) {
  const __m128i wide = _mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  // The code is read as float16, whose exponent is then too small by 8. Bit 14 repeats the sign
  // and is cleared; adding 0x80 sets it again only for NaN, which makes a NaN of float16.
  const __m128i half = _mm_and_si128(_mm_slli_epi16(wide, 7), _mm_set1_epi16(~0x4000));
  const __m128i nan =
      _mm_and_si128(_mm_add_epi16(half, _mm_set1_epi16(0x80)), _mm_set1_epi16(0x4000));
  return _mm256_mul_ps(_mm256_cvtph_ps(_mm_or_si128(half, nan)), _mm256_set1_ps(256.0F));
}
inline Vector load(const Float8E5M2* p) {
  const __m128i codes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  return _mm256_cvtph_ps(_mm_unpacklo_epi8(_mm_setzero_si128(), codes));  // upper halves
}
inline Vector load(const int8_t* p) {
  return _mm256_cvtepi32_ps(
      _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)))
  );
}
inline void store(float* p, Vector x) { _mm256_storeu_ps(p, x); }
inline void store(Half* p, Vector x) {
  _mm_storeu_si128(
      reinterpret_cast<__m128i*>(p),
      _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)
  );
}
inline void store(Bfloat16* p, Vector x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i bias = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
  const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, bias), 16);
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  const __m256i safe = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), nan);
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(safe, safe), 0xd8);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
}
/// Stores the low bytes of eight numbers in [-128, 255].
inline void store_bytes(void* p, __m256i x) {
  const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  const __m128i bytes = _mm_and_si128(words, _mm_set1_epi16(0xff));
  _mm_storel_epi64(static_cast<__m128i*>(p), _mm_packus_epi16(bytes, bytes));
}
inline void store(Float8* p, Vector x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i size = _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff));
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 20), _mm256_set1_epi32(1));
  const __m256i bias = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7ffff - (120 << 23)));
  const __m256i normal = _mm256_srai_epi32(_mm256_add_epi32(size, bias), 20);
  // Adding 2^14 shifts a subnormal's bits to the bottom, rounded to even.
  const __m256i magic = _mm256_set1_epi32(0x46800000);
  const __m256i shifted =
      _mm256_castps_si256(_mm256_add_ps(_mm256_castsi256_ps(size), _mm256_castsi256_ps(magic)));
  const __m256i is_normal = _mm256_cmpgt_epi32(size, _mm256_set1_epi32(0x3c7fffff));
  const __m256i code = _mm256_blendv_epi8(_mm256_sub_epi32(shifted, magic), normal, is_normal);
  const __m256i sign = _mm256_and_si256(_mm256_srli_epi32(bits, 24), _mm256_set1_epi32(0x80));
  store_bytes(p, _mm256_or_si256(code, sign));
}
inline void store(Float8E5M2* p, Vector x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i any_size = _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff));
  const __m256i nan = _mm256_cmpgt_epi32(any_size, _mm256_set1_epi32(0x7f800000));
  // Numbers from 2^16 on become infinities: 2^16 gets their code by the rule of normal numbers.
  const __m256i size = _mm256_min_epi32(any_size, _mm256_set1_epi32(0x47800000));
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(size, 21), _mm256_set1_epi32(1));
  const __m256i bias = _mm256_add_epi32(odd, _mm256_set1_epi32(0xfffff - (112 << 23)));
  const __m256i normal = _mm256_srai_epi32(_mm256_add_epi32(size, bias), 21);
  // Adding 2^7 shifts a subnormal's bits to the bottom, rounded to even.
  const __m256i magic = _mm256_set1_epi32(0x43000000);
  const __m256i shifted =
      _mm256_castps_si256(_mm256_add_ps(_mm256_castsi256_ps(size), _mm256_castsi256_ps(magic)));
  const __m256i is_normal = _mm256_cmpgt_epi32(size, _mm256_set1_epi32(0x387fffff));
  const __m256i number = _mm256_blendv_epi8(_mm256_sub_epi32(shifted, magic), normal, is_normal);
  const __m256i code = _mm256_blendv_epi8(number, _mm256_set1_epi32(0x7f), nan);
  const __m256i sign = _mm256_and_si256(_mm256_srli_epi32(bits, 24), _mm256_set1_epi32(0x80));
  store_bytes(p, _mm256_or_si256(code, sign));
}
inline void store(int8_t* p, Vector x) { store_bytes(p, _mm256_cvtps_epi32(x)); }

inline Vector add(Vector a, Vector b) { return _mm256_add_ps(a, b); }
inline Vector sub(Vector a, Vector b) { return _mm256_sub_ps(a, b); }
inline Vector mul(Vector a, Vector b) { return _mm256_mul_ps(a, b); }
inline Vector div(Vector a, Vector b) { return _mm256_div_ps(a, b); }
inline Vector fma(Vector a, Vector b, Vector c) { return _mm256_fmadd_ps(a, b, c); }
inline Vector max(Vector a, Vector b) { return _mm256_max_ps(a, b); }
inline Vector min(Vector a, Vector b) { return _mm256_min_ps(a, b); }
inline float reduce_add(Vector x) {
  __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  y = _mm_add_ps(y, _mm_movehl_ps(y, y));
  return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
}
inline float reduce_max(Vector x) {
  __m128 y = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  y = _mm_max_ps(y, _mm_movehl_ps(y, y));
  return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
}

/// Splits x into an integer for scale_by_power and the rest in [0, 1]. Smaller x counts as
/// kLeastExponent - 1, whose power is 0.
inline Vector split_exponent(Vector x, Vector& rest) {
  x = max(splat(kLeastExponent - 1), x);
  const Vector n = _mm256_floor_ps(x);
  rest = sub(x, n);
  return n;
}
/// x * 2^n for integral n up to 127, with powers below the least counted as 0.
inline Vector scale_by_power(Vector x, Vector n) {
  const __m256i exponent = _mm256_cvtps_epi32(n);
  const __m256i kept =
      _mm256_cmpgt_epi32(exponent, _mm256_set1_epi32(static_cast<int>(kLeastExponent) - 1));
  const __m256i biased = _mm256_add_epi32(exponent, _mm256_set1_epi32(127));
  const __m256i power = _mm256_and_si256(_mm256_slli_epi32(biased, 23), kept);
  return mul(x, _mm256_castsi256_ps(power));
}

inline Vector select(uint32_t bits, Vector x, Vector other) {
  const __m256i lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  const __m256i set = _mm256_and_si256(_mm256_set1_epi32(static_cast<int>(bits)), lane);
  return _mm256_blendv_ps(other, x, _mm256_castsi256_ps(_mm256_cmpeq_epi32(set, lane)));
}

/// 8 x 8 transpose.
inline void transpose(Vector* r) {
  Vector t[8];
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
  }
  Vector u[8];
  for (int i = 0; i < 8; i += 4) {
    u[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
    u[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
    u[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
    u[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
  }
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm256_permute2f128_ps(u[i], u[i + 4], 0x20);
    r[i + 4] = _mm256_permute2f128_ps(u[i], u[i + 4], 0x31);
  }
}

template <int kDistance>
inline Vector exchange(Vector x) {
  if constexpr (kDistance == 1) return _mm256_permute_ps(x, 0xb1);
  if constexpr (kDistance == 2) return _mm256_permute_ps(x, 0x4e);
  return _mm256_permute2f128_ps(x, x, 1);
}

inline Vector load_quad(const float* p) {
  return _mm256_broadcast_ps(reinterpret_cast<const __m128*>(p));
}

inline Vector sums_of_quads(Vector a, Vector b, Vector c, Vector d) {
  return _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
}

constexpr int kCodes = kLanes;
inline void expand(const Float8* p, Bfloat16* out) { store(out, load(p)); }
inline void expand(const Float8* p, Vector scale, Bfloat16* out) {
  store(out, mul(load(p), scale));
}

// Integers, comparisons and compression, for top-k selection.
using Integers = __m256i;

inline Integers load(const int32_t* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}
inline void store(int32_t* p, Integers x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x); }
inline Integers ascending(int32_t first) {
  return _mm256_add_epi32(_mm256_set1_epi32(first), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
inline int32_t reduce_add(Integers x) {
  __m128i y = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  y = _mm_add_epi32(y, _mm_unpackhi_epi64(y, y));
  return _mm_cvtsi128_si32(_mm_add_epi32(y, _mm_shuffle_epi32(y, 1)));
}

inline uint32_t greater(Vector a, Vector b) {
  return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GT_OQ)));
}
inline uint32_t greater_equal(Vector a, Vector b) {
  return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GE_OQ)));
}
inline Integers count_greater(Integers counts, Vector a, Vector b) {
  return _mm256_sub_epi32(counts, _mm256_castps_si256(_mm256_cmp_ps(a, b, _CMP_GT_OQ)));
}
inline Vector without_nan(Vector x) { return max(x, splat(-__builtin_inff())); }

/// The numbers of the lanes of each set, ascending.
struct CompressTable {
  uint8_t lanes[256][8] = {};
  constexpr CompressTable() {
    for (int bits = 0; bits < 256; ++bits) {
      for (int lane = 0, n = 0; lane < 8; ++lane) {
        if ((bits >> lane & 1) != 0) lanes[bits][n++] = static_cast<uint8_t>(lane);
      }
    }
  }
};
constexpr CompressTable kCompress;

inline void store_compressed(int32_t* p, uint32_t bits, Integers x) {
  const __m128i lanes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(kCompress.lanes[bits]));
  store(p, _mm256_permutevar8x32_epi32(x, _mm256_cvtepu8_epi32(lanes)));
}
inline void store_compressed(float* p, uint32_t bits, Vector x) {
  const __m128i lanes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(kCompress.lanes[bits]));
  store(p, _mm256_permutevar8x32_ps(x, _mm256_cvtepu8_epi32(lanes)));
}

}  // namespace
}  // namespace cpattn::kernels
