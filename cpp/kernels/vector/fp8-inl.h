// SPDX-License-Identifier: Apache-2.0
#pragma once

// Rows of e4m3fn codes. Needs the vector layer included first, which loads, stores and expands one
// vector of codes.
#include "kernels/vector/elements-inl.h"

namespace cpattn::kernels {
namespace {

/// out[i] = codes[i], exact. Here and below n is a multiple of 32.
inline void expand_row(const Float8* codes, int64_t n, Bfloat16* out) {
  for (int64_t i = 0; i < n; i += kCodes) expand(codes + i, out + i);
}

/// out[i] = codes[i] * scale in float32, rounded to nearest even. The result is NaN if the code or
/// the scale is.
inline void expand_row(const Float8* codes, int64_t n, float scale, Bfloat16* out) {
  const Vector factor = splat(scale == scale ? scale : __builtin_nanf(""));
  for (int64_t i = 0; i < n; i += kCodes) expand(codes + i, factor, out + i);
}
inline void expand_row(const Float8* codes, int64_t n, float scale, float* out) {
  for (int64_t i = 0; i < n; i += kLanes) store(out + i, mul(load(codes + i), splat(scale)));
}

}  // namespace
}  // namespace cpattn::kernels
