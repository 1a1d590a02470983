// SPDX-License-Identifier: Apache-2.0
#pragma once

// The kernels of scatter_kernel.h. Needs the vector layer included first.
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "kernels/boundary/scatter_kernel.h"
#include "kernels/vector/tails-inl.h"

namespace cpattn::kernels {
namespace {

/// x, clamped for store() of `Code`: for e4m3fn to magnitudes of at most 448, with -480, which
/// becomes NaN, for NaN; for int8 to at most 127, with -128 for NaN.
template <class Code>
Vector storable(Vector x) {
  return x;
}
template <>
inline Vector storable<Float8>(Vector x) {
  const Vector above = max(splat(-448.0F), x);  // in this order, which keeps NaN
  return min(max(without_nan(above), splat(-480.0F)), splat(448.0F));
}
template <>
inline Vector storable<int8_t>(Vector x) {
  const Vector above = max(splat(-127.0F), x);
  return min(max(without_nan(above), splat(-128.0F)), splat(127.0F));
}
template <>
inline Vector storable<Float8E5M2>(Vector x) {
  const Vector most = splat(__FLT_MAX__), least = splat(-__FLT_MAX__);
  const Vector finite = min(splat(57344.0F), max(splat(-57344.0F), x));  // NaN is kept
  return select(greater(x, most) | greater(least, x), x, finite);
}

/// Casts numbers without float32 if there is a way; returns how many it has cast.
template <class T, class Code>
int64_t cast_directly(const T* /*from*/, int64_t /*n*/, Code* /*to*/) {
  return 0;
}
#if defined(__AVX512BW__)
/// Casts in 16 bits, twice as fast: the significand, shifted by 4 for normal numbers of e4m3fn and
/// by more below 2^-6, is rounded to nearest even, and the exponent, from 2^-6 on, added.
inline int64_t cast_directly(const Bfloat16* x, int64_t n, Float8* out) {
  constexpr int64_t kNumbers = 32;
  const __m512i one = _mm512_set1_epi16(1);
  const __m512i least = _mm512_set1_epi16(121);  // the exponent of 2^-6
  int64_t i = 0;
  for (; i + kNumbers <= n; i += kNumbers) {
    const __m512i bits = _mm512_loadu_si512(x + i);
    const __m512i any_size = _mm512_and_si512(bits, _mm512_set1_epi16(0x7fff));
    const __mmask32 nan = _mm512_cmpgt_epi16_mask(any_size, _mm512_set1_epi16(0x7f80));
    const __m512i size = _mm512_min_epu16(any_size, _mm512_set1_epi16(0x43e0));  // 448
    const __m512i exponent = _mm512_srli_epi16(size, 7);
    const __m512i fraction = _mm512_and_si512(size, _mm512_set1_epi16(0x7f));
    const __m512i significand = _mm512_or_si512(fraction, _mm512_set1_epi16(0x80));
    const __m512i below = _mm512_subs_epu16(least, exponent);
    const __m512i shift = _mm512_add_epi16(below, _mm512_set1_epi16(4));
    const __m512i odd = _mm512_and_si512(_mm512_srlv_epi16(significand, shift), one);
    const __m512i half = _mm512_sllv_epi16(_mm512_set1_epi16(8), below);
    const __m512i bias = _mm512_add_epi16(_mm512_sub_epi16(half, one), odd);
    const __m512i rounded = _mm512_srlv_epi16(_mm512_add_epi16(significand, bias), shift);
    const __m512i above = _mm512_slli_epi16(_mm512_subs_epu16(exponent, least), 3);
    const __m512i number = _mm512_add_epi16(rounded, above);
    const __m512i code = _mm512_mask_mov_epi16(number, nan, _mm512_set1_epi16(0x7f));
    const __m512i sign = _mm512_and_si512(_mm512_srli_epi16(bits, 8), _mm512_set1_epi16(0x80));
    const __m512i signed_code = _mm512_or_si512(code, sign);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i), _mm512_cvtepi16_epi8(signed_code));
  }
  return i;
}
#endif

template <class T, class Code>
void cast_row(const void* x, int64_t n, float scale, void* out) {
  const T* from = static_cast<const T*>(x);
  auto* to = static_cast<Code*>(out);
  const Vector divisor = splat(scale);
  int64_t i = 0;
  if (scale == 1) {
    i = cast_directly(from, n, to);
    for (; i + kLanes <= n; i += kLanes) store(to + i, storable<Code>(load(from + i)));
  } else {
    for (; i + kLanes <= n; i += kLanes) {
      store(to + i, storable<Code>(div(load(from + i), divisor)));
    }
  }
  if (i < n) {
    store_some(to + i, storable<Code>(div(load_some(from + i, n - i), divisor)), n - i);
  }
}

template <class T>
float largest(const void* x, int64_t n) {
  const T* from = static_cast<const T*>(x);
  const Vector zero = splat(0.0F);
  Vector sizes = zero, poison = zero;  // infinities and NaN turn both into NaN
  for (int64_t i = 0; i < n; i += kLanes) {
    const Vector v = load_some(from + i, n - i);
    sizes = max(sizes, max(sub(zero, v), v));
    poison = fma(v, zero, poison);
  }
  return reduce_max(without_nan(sizes)) + reduce_add(poison);
}

#if defined(__AVX512F__)
inline void stream_line(const char* from, char* to) {
  _mm512_stream_si512(reinterpret_cast<__m512i*>(to), _mm512_loadu_si512(from));
}
#elif defined(__AVX__)
inline void stream_line(const char* from, char* to) {
  const auto* x = reinterpret_cast<const __m256i*>(from);
  auto* y = reinterpret_cast<__m256i*>(to);
  for (int i = 0; i < 2; ++i) _mm256_stream_si256(y + i, _mm256_loadu_si256(x + i));
}
#elif defined(__x86_64__)
inline void stream_line(const char* from, char* to) {
  const auto* x = reinterpret_cast<const __m128i*>(from);
  auto* y = reinterpret_cast<__m128i*>(to);
  for (int i = 0; i < 4; ++i) _mm_stream_si128(y + i, _mm_loadu_si128(x + i));
}
#else
inline void stream_line(const char* from, char* to) { __builtin_memcpy(to, from, kStreamBytes); }
#endif

inline void stream(const void* from, int64_t bytes, void* to) {
  const char* x = static_cast<const char*>(from);
  char* y = static_cast<char*>(to);
  for (int64_t i = 0; i < bytes; i += kStreamBytes) stream_line(x + i, y + i);
}

inline void finish_stream() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

template <class T>
constexpr void set_casts(decltype(ScatterKernels::cast[0])& casts) {
  casts[kFloat32] = &cast_row<T, float>;
  casts[kFloat16] = &cast_row<T, Half>;
  casts[kBfloat16] = &cast_row<T, Bfloat16>;
  casts[kCastFloat8] = &cast_row<T, Float8>;
  casts[kCastFloat8E5M2] = &cast_row<T, Float8E5M2>;
  casts[kCastInt8] = &cast_row<T, int8_t>;
}

constexpr ScatterKernels scatter_kernels() {
  ScatterKernels kernels = {
      .cast = {},
      .largest = {},
      .stream = &stream,
      .finish_stream = &finish_stream,
  };
  set_casts<float>(kernels.cast[kFloat32]);
  set_casts<Half>(kernels.cast[kFloat16]);
  set_casts<Bfloat16>(kernels.cast[kBfloat16]);
  kernels.largest[kFloat32] = &largest<float>;
  kernels.largest[kFloat16] = &largest<Half>;
  kernels.largest[kBfloat16] = &largest<Bfloat16>;
  return kernels;
}

}  // namespace
}  // namespace cpattn::kernels
