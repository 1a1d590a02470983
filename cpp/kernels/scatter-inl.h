// SPDX-License-Identifier: Apache-2.0
#pragma once

// The kernels of scatter_kernel.h. Needs the vector layer included first.
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "kernels/elements-inl.h"
#include "kernels/rows_norm-inl.h"
#include "kernels/scatter_kernel.h"

namespace cpattn::kernels {
namespace {

/// What store() of `Code` takes. For e4m3fn: at most 448 in size, or -480, whose code would be
/// that of NaN, for NaN. max() with a number first keeps NaN.
template <class Code>
Vector storable(Vector x) {
  return x;
}
template <>
inline Vector storable<Float8>(Vector x) {
  const Vector above = max(splat(-448.0F), x);
  return min(max(without_nan(above), splat(-480.0F)), splat(448.0F));
}

template <class T, class Code>
void cast_row(const void* x, int64_t n, float scale, void* out) {
  const T* from = static_cast<const T*>(x);
  auto* to = static_cast<Code*>(out);
  int64_t i = 0;
  if (scale == 1) {
    for (; i + kLanes <= n; i += kLanes) store(to + i, storable<Code>(load(from + i)));
  } else {
    const Vector divisor = splat(scale);
    for (; i + kLanes <= n; i += kLanes) {
      store(to + i, storable<Code>(div(load(from + i), divisor)));
    }
  }
  if (i < n) {
    store_some(to + i, storable<Code>(div(load_some(from + i, n - i), splat(scale))), n - i);
  }
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

constexpr ScatterKernels scatter_kernels() {
  return {
      .cast =
          {
              {&cast_row<float, float>, &cast_row<float, Half>, &cast_row<float, Bfloat16>,
               &cast_row<float, Float8>},
              {&cast_row<Half, float>, &cast_row<Half, Half>, &cast_row<Half, Bfloat16>,
               &cast_row<Half, Float8>},
              {&cast_row<Bfloat16, float>, &cast_row<Bfloat16, Half>, &cast_row<Bfloat16, Bfloat16>,
               &cast_row<Bfloat16, Float8>},
          },
      .stream = &stream,
      .finish_stream = &finish_stream,
  };
}

}  // namespace
}  // namespace cpattn::kernels
