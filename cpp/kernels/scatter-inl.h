// SPDX-License-Identifier: Apache-2.0
#pragma once

// The kernels of scatter_kernel.h. Needs the vector layer included first.
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

constexpr ScatterKernels scatter_kernels() {
  return {
      .cast = {
          {&cast_row<float, float>, &cast_row<float, Half>, &cast_row<float, Bfloat16>,
           &cast_row<float, Float8>},
          {&cast_row<Half, float>, &cast_row<Half, Half>, &cast_row<Half, Bfloat16>,
           &cast_row<Half, Float8>},
          {&cast_row<Bfloat16, float>, &cast_row<Bfloat16, Half>, &cast_row<Bfloat16, Bfloat16>,
           &cast_row<Bfloat16, Float8>},
      },
  };
}

}  // namespace
}  // namespace cpattn::kernels
