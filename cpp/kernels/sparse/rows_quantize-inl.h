// SPDX-License-Identifier: Apache-2.0
#pragma once

// Groups of 128 numbers as codes and a scale. Needs the vector layer included first.
#include "kernels/boundary/rows_kernel.h"
#include "kernels/vector/elements-inl.h"

namespace cpattn::kernels {
namespace {

constexpr float kLargestCode = 448.0F;
constexpr float kSmallestNormal = 0x1p-126F;

/// The largest magnitude of a group, NaN if a number is not finite.
template <class T>
float largest_of_group(const T* x) {
  Vector high = splat(0.0F);
  Vector low = high;
  Vector zero_or_nan = high;
  for (int64_t i = 0; i < kGroup; i += kLanes) {
    const Vector v = load(x + i);
    high = max(v, high);
    low = min(v, low);
    zero_or_nan = fma(v, splat(0.0F), zero_or_nan);
  }
  return reduce_max(max(high, sub(splat(0.0F), low))) + reduce_add(zero_or_nan);
}

template <class Code>
void fill_group(Code code, Code* codes) {
  for (int64_t i = 0; i < kGroup; ++i) codes[i] = code;
}

template <class T, class Code>
void quantize_group(const T* x, Vector factor, Code* codes) {
  for (int64_t i = 0; i < kGroup; i += kLanes) store(codes + i, mul(load(x + i), factor));
}

/// All scales come before the first code: the divisions are slow but overlap.
template <class T>
void quantize_kv_row(const void* nope, const void* rope, void* codes, void* rope_out) {
  constexpr int kGroups = kKvCodes / kGroup;
  const T* x = static_cast<const T*>(nope);
  auto* to = static_cast<Float8*>(codes);
  float scales[kGroups];
  for (int i = 0; i < kGroups; ++i) scales[i] = largest_of_group(x + i * kGroup) / kLargestCode;
  for (int i = 0; i < kGroups; ++i, x += kGroup, to += kGroup) {
    if (scales[i] >= kSmallestNormal) {
      quantize_group(x, splat(1 / scales[i]), to);
    } else if (scales[i] == scales[i]) {
      fill_group({0}, to);
      scales[i] = 0;
    } else {
      fill_group({0x7f}, to);
      scales[i] = __builtin_nanf("");
    }
  }
  __builtin_memcpy(to, scales, sizeof scales);
  // Rows are bytes, which may begin anywhere: no bfloat16 is stored in place.
  Bfloat16 rounded[kKvRope];
  for (int64_t i = 0; i < kKvRope; i += kLanes) {
    store(rounded + i, load(static_cast<const T*>(rope) + i));
  }
  __builtin_memcpy(rope_out, rounded, sizeof rounded);
}

/// The smallest power of two not below x, which is normal and > 0.
inline float power_of_two_above(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, sizeof bits);
  bits = (bits + 0x7fffff) & 0xff800000U;
  __builtin_memcpy(&x, &bits, sizeof bits);
  return x;
}

template <class T, class Code>
void quantize_scaled(const T* x, float scale, Code nan, Code* codes) {
  if (scale != scale) return fill_group(nan, codes);
  for (int64_t i = 0; i < kGroup; i += kLanes) store(codes + i, div(load(x + i), splat(scale)));
}

template <class T>
void quantize_groups(const void* x, int64_t n, GroupFormat format, void* codes, float* scales) {
  const T* from = static_cast<const T*>(x);
  for (int64_t i = 0; i < n; i += kGroup) {
    const float largest = largest_of_group(from + i);
    const float scale =
        (largest < 1e-4F ? 1e-4F : largest) / (format == kGroupInt8 ? 127 : kLargestCode);
    scales[i / kGroup] = largest != largest                 ? __builtin_nanf("")
                         : format == kGroupFloat8PowerOfTwo ? power_of_two_above(scale)
                                                            : scale;
  }
  for (int64_t i = 0; i < n; i += kGroup) {
    const float scale = scales[i / kGroup];
    if (format == kGroupInt8) {
      quantize_scaled(from + i, scale, int8_t{0}, static_cast<int8_t*>(codes) + i);
    } else {
      quantize_scaled(from + i, scale, Float8{0x7f}, static_cast<Float8*>(codes) + i);
    }
  }
}

}  // namespace
}  // namespace cpattn::kernels
