// SPDX-License-Identifier: Apache-2.0
#pragma once

// Rows of codes of 8 bits become rows of numbers. Needs the vector layer included first.
#include "kernels/vector/fp8-inl.h"

namespace cpattn::kernels {
namespace {

inline int expand_quickly(const void* /*codes*/, int /*dim*/, void* /*out*/) { return 0; }
inline int expand_quickly(const Float8* codes, int dim, Bfloat16* out) {
  const int quick = dim / kCodes * kCodes;
  expand_row(codes, quick, out);
  return quick;
}

/// Expands codes times a factor if there is a faster way than one vector after the other; returns
/// how many of `dim` it has expanded.
template <class T, class Code>
int expand_scaled_quickly(const Code* /*codes*/, int /*dim*/, Vector /*factor*/, T* /*out*/) {
  return 0;
}
#if defined(__AVX512BF16__)
template <class Code>
int expand_scaled_quickly(const Code* codes, int dim, Vector factor, Bfloat16* out) {
  int d = 0;
  for (; d + 2 * kLanes <= dim; d += 2 * kLanes) {
    Vector first;
    Vector second;
    load_two(codes + d, first, second);
    const __m512bh rounded = _mm512_cvtne2ps_pbh(mul(second, factor), mul(first, factor));
    _mm512_storeu_si512(out + d, reinterpret_cast<__m512i>(rounded));
  }
  return d;
}
#endif

/// AttentionKernel::expand_codes.
template <class T, class Code>
void expand_codes(const char* const* rows, int n, int dim, const float* factors, void* elements) {
  T* out = static_cast<T*>(elements);
  for (int i = 0; i < n; ++i, out += dim) {
    const Code* codes = reinterpret_cast<const Code*>(rows[i]);
    if (factors != nullptr) {
      const Vector factor = splat(factors[i]);
      for (int d = expand_scaled_quickly(codes, dim, factor, out); d < dim; d += kLanes) {
        store(out + d, mul(load(codes + d), factor));
      }
      continue;
    }
    for (int d = expand_quickly(codes, dim, out); d < dim; d += kLanes) {
      store(out + d, load(codes + d));
    }
  }
}

}  // namespace
}  // namespace cpattn::kernels
