// SPDX-License-Identifier: Apache-2.0
#pragma once

// Groups of 128 numbers as codes and a scale. Needs the vector layer included first.
#include "kernels/elements-inl.h"
#include "kernels/rows_kernel.h"

namespace cpattn::kernels {
namespace {

constexpr float kLargestCode = 448.0F;
constexpr float kSmallestNormal = 0x1p-126F;

/// The largest of a group in size, NaN if one is not finite.
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

/// One group of a row of the FP8 cache; gives the scale.
template <class T>
float quantize_kv_group(const T* x, Float8* codes) {
  const float scale = largest_of_group(x) / kLargestCode;
  if (scale < kSmallestNormal) {
    fill_group({0}, codes);
    return 0;
  }
  if (scale != scale) {
    fill_group({0x7f}, codes);
    return __builtin_nanf("");
  }
  const Vector factor = splat(1 / scale);
  for (int64_t i = 0; i < kGroup; i += kLanes) store(codes + i, mul(load(x + i), factor));
  return scale;
}

template <class T>
void quantize_kv_row(const void* nope, const void* rope, void* codes, void* rope_out) {
  const T* x = static_cast<const T*>(nope);
  char* bytes = static_cast<char*>(codes);
  for (int64_t i = 0; i < kKvCodes; i += kGroup) {
    const float scale = quantize_kv_group(x + i, reinterpret_cast<Float8*>(bytes + i));
    __builtin_memcpy(bytes + kKvCodes + i / kGroup * 4, &scale, sizeof scale);
  }
  for (int64_t i = 0; i < kKvRope; i += kLanes) {
    store(static_cast<Bfloat16*>(rope_out) + i, load(static_cast<const T*>(rope) + i));
  }
}

/// x > 0, normal: the smallest power of two that is not below it.
inline float power_of_two_above(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, sizeof bits);
  bits = (bits + 0x7fffff) & 0xff800000U;
  __builtin_memcpy(&x, &bits, sizeof bits);
  return x;
}

template <class T, class Code>
float quantize_group(const T* x, float most, bool power_of_two, Code nan, Code* codes) {
  const float largest = largest_of_group(x);
  if (largest != largest) {
    fill_group(nan, codes);
    return __builtin_nanf("");
  }
  float scale = (largest < 1e-4F ? 1e-4F : largest) / most;
  if (power_of_two) scale = power_of_two_above(scale);
  for (int64_t i = 0; i < kGroup; i += kLanes) store(codes + i, div(load(x + i), splat(scale)));
  return scale;
}

template <class T>
void quantize_groups(const void* x, int64_t n, GroupFormat format, void* codes, float* scales) {
  for (int64_t i = 0; i < n; i += kGroup) {
    const T* group = static_cast<const T*>(x) + i;
    if (format == kGroupInt8) {
      *scales++ = quantize_group(group, 127, false, int8_t{0}, static_cast<int8_t*>(codes) + i);
    } else {
      *scales++ = quantize_group(
          group, kLargestCode, format == kGroupFloat8PowerOfTwo, Float8{0x7f},
          static_cast<Float8*>(codes) + i
      );
    }
  }
}

}  // namespace
}  // namespace cpattn::kernels
