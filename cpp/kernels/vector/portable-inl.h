// SPDX-License-Identifier: Apache-2.0
#pragma once

// The vector layer in the compiler's vector extension, four lanes: SSE on x86-64, NEON on Arm,
// correct anywhere. contract-inl.h has the contract of its functions.
#include <stdint.h>
#include <string.h>

#include "kernels/vector/elements-inl.h"

namespace cpattn::kernels {
namespace {

typedef float Vector __attribute__((vector_size(16)));
typedef int32_t Integers __attribute__((vector_size(16)));
constexpr int kLanes = 4;
/// Columns of one packed panel, in vectors: 6 x 2 accumulators fill the registers.
constexpr int kPanelVectors = 2;

inline float from_bits(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}
inline uint32_t to_bits(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}

inline float widen(Bfloat16 x) { return from_bits(uint32_t{x.bits} << 16); }
inline float widen(Half x) {
  const uint32_t sign = (x.bits & 0x8000U) << 16;
  const uint32_t magnitude = x.bits & 0x7fffU;
  if (magnitude >= 0x7c00) return from_bits(sign | 0x7f800000U | (magnitude & 0x3ffU) << 13);
  // Shifted into place the exponent is off by 112; the product corrects that for normal and
  // subnormal numbers.
  return from_bits(sign | to_bits(from_bits(magnitude << 13) * 0x1p112F));
}
inline float widen(Float8 x) {
  const uint32_t sign = (x.bits & 0x80U) << 24;
  const uint32_t magnitude = x.bits & 0x7fU;
  if (magnitude == 0x7f) return from_bits(0x7fc00000U);
  const float subnormal = static_cast<float>(magnitude) * 0x1p-9F;
  return from_bits(sign | (magnitude < 8 ? to_bits(subnormal) : (magnitude + (120 << 3)) << 20));
}
inline float widen(Float8E5M2 x) {
  const uint32_t sign = (x.bits & 0x80U) << 24;
  const uint32_t magnitude = x.bits & 0x7fU;
  if (magnitude >= 0x7c) return from_bits(sign | 0x7f800000U | (magnitude & 3) << 21);
  const float subnormal = static_cast<float>(magnitude) * 0x1p-16F;
  return from_bits(sign | (magnitude < 4 ? to_bits(subnormal) : (magnitude + (112 << 2)) << 21));
}
inline float widen(int8_t x) { return x; }
inline void narrow(float x, Bfloat16* p) {
  const uint32_t bits = to_bits(x);
  p->bits = x == x ? static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) : 0x7fc0;
}
inline void narrow(float x, Half* p) {
  const uint32_t bits = to_bits(x);
  const auto sign = static_cast<uint16_t>((bits >> 16) & 0x8000U);
  const uint32_t magnitude = bits & 0x7fffffffU;
  uint32_t half;
  if (magnitude > 0x7f800000U) {
    half = 0x7e00;
  } else if (magnitude >= 0x477ff000U) {  // rounds to 65536 or more
    half = 0x7c00;
  } else if (magnitude >= 0x38800000U) {
    half = (magnitude - 0x38000000U + 0xfff + ((magnitude >> 13) & 1)) >> 13;
  } else {
    // Adding 0.5 shifts a subnormal's bits to the bottom, rounded to even.
    half = to_bits(from_bits(magnitude) + 0.5F) - 0x3f000000U;
  }
  p->bits = static_cast<uint16_t>(sign | half);
}

inline void narrow(float x, Float8* p) {
  const uint32_t sign = to_bits(x) >> 24 & 0x80U;
  const uint32_t magnitude = to_bits(x) & 0x7fffffffU;
  uint32_t code;
  if (magnitude >= 0x3c800000U) {  // 2^-6
    code = (magnitude - (120U << 23) + 0x7ffff + (magnitude >> 20 & 1)) >> 20;
  } else {
    // Adding 2^14 shifts a subnormal's bits to the bottom, rounded to even.
    code = to_bits(from_bits(magnitude) + 0x1p14F) - to_bits(0x1p14F);
  }
  p->bits = static_cast<uint8_t>(sign | code);
}
inline void narrow(float x, Float8E5M2* p) {
  const uint32_t sign = to_bits(x) >> 24 & 0x80U;
  const uint32_t magnitude = to_bits(x) & 0x7fffffffU;
  uint32_t code;
  if (magnitude > 0x7f800000U) {
    code = 0x7f;
  } else if (magnitude >= 0x47700000U) {  // rounds to 65536 or more
    code = 0x7c;
  } else if (magnitude >= 0x38800000U) {  // 2^-14
    code = (magnitude - (112U << 23) + 0xfffff + (magnitude >> 21 & 1)) >> 21;
  } else {
    // Adding 2^7 shifts a subnormal's bits to the bottom, rounded to even.
    code = to_bits(from_bits(magnitude) + 0x1p7F) - to_bits(0x1p7F);
  }
  p->bits = static_cast<uint8_t>(sign | code);
}
inline void narrow(float x, int8_t* p) { *p = static_cast<int8_t>(to_bits(x + 0x1.8p23F)); }

inline Vector splat(float x) { return Vector{x, x, x, x}; }
inline Vector load(const float* p) {
  Vector x;
  memcpy(&x, p, sizeof x);
  return x;
}
template <class T>
inline Vector load(const T* p) {
  return Vector{widen(p[0]), widen(p[1]), widen(p[2]), widen(p[3])};
}
inline void store(float* p, Vector x) { memcpy(p, &x, sizeof x); }
template <class T>
inline void store(T* p, Vector x) {
  for (int i = 0; i < kLanes; ++i) narrow(x[i], p + i);
}

inline Vector add(Vector a, Vector b) { return a + b; }
inline Vector sub(Vector a, Vector b) { return a - b; }
inline Vector mul(Vector a, Vector b) { return a * b; }
inline Vector div(Vector a, Vector b) { return a / b; }
inline Vector fma(Vector a, Vector b, Vector c) { return a * b + c; }
inline Vector max(Vector a, Vector b) { return a > b ? a : b; }
inline Vector min(Vector a, Vector b) { return a < b ? a : b; }
inline float reduce_add(Vector x) { return (x[0] + x[2]) + (x[1] + x[3]); }
inline float reduce_max(Vector x) {
  const float a = x[0] > x[2] ? x[0] : x[2];
  const float b = x[1] > x[3] ? x[1] : x[3];
  return a > b ? a : b;
}

/// Splits x < 2^22 into an integer for scale_by_power and the rest in [0, 1].
/// Smaller x counts as kLeastExponent - 1, whose power is 0.
inline Vector split_exponent(Vector x, Vector& rest) {
  const Vector magic = splat(0x1.8p23F);
  x = max(splat(kLeastExponent - 1), x);
  const Vector n = (x - 0.5F) + magic - magic;
  rest = x - n;
  return n;
}
/// x * 2^n for integral n up to 127, with powers below the least counted as 0.
inline Vector scale_by_power(Vector x, Vector n) {
  const Vector shifted = n + 0x1.8p23F;  // has n in its low bits, and is defined for NaN
  Integers exponent;
  memcpy(&exponent, &shifted, sizeof exponent);
  exponent = ((exponent + 127) << 23) & (n >= kLeastExponent);
  Vector power;
  memcpy(&power, &exponent, sizeof power);
  return x * power;
}

inline Vector select(uint32_t bits, Vector x, Vector other) {
  const Integers lane = {1, 2, 4, 8};
  const Integers mask = (lane & static_cast<int32_t>(bits)) == lane;
  return mask ? x : other;
}

/// 4 x 4 transpose.
inline void transpose(Vector* r) {
  const Vector a = __builtin_shufflevector(r[0], r[1], 0, 4, 1, 5);
  const Vector b = __builtin_shufflevector(r[2], r[3], 0, 4, 1, 5);
  const Vector c = __builtin_shufflevector(r[0], r[1], 2, 6, 3, 7);
  const Vector d = __builtin_shufflevector(r[2], r[3], 2, 6, 3, 7);
  r[0] = __builtin_shufflevector(a, b, 0, 1, 4, 5);
  r[1] = __builtin_shufflevector(a, b, 2, 3, 6, 7);
  r[2] = __builtin_shufflevector(c, d, 0, 1, 4, 5);
  r[3] = __builtin_shufflevector(c, d, 2, 3, 6, 7);
}

template <int kDistance>
inline Vector exchange(Vector x) {
  return __builtin_shufflevector(x, x, kDistance, kDistance ^ 1, kDistance ^ 2, kDistance ^ 3);
}

inline Vector load_quad(const float* p) { return load(p); }

inline Vector sums_of_quads(Vector a, Vector b, Vector c, Vector d) {
  Vector r[4] = {a, b, c, d};
  transpose(r);
  return (r[0] + r[1]) + (r[2] + r[3]);
}

constexpr int kCodes = kLanes;
inline void expand(const Float8* p, Bfloat16* out) { store(out, load(p)); }
inline void expand(const Float8* p, Vector scale, Bfloat16* out) {
  store(out, mul(load(p), scale));
}

// Integers, comparisons and compression, for top-k selection.
inline Integers load(const int32_t* p) {
  Integers x;
  memcpy(&x, p, sizeof x);
  return x;
}
inline void store(int32_t* p, Integers x) { memcpy(p, &x, sizeof x); }
inline Integers ascending(int32_t first) { return Integers{0, 1, 2, 3} + first; }
inline int32_t reduce_add(Integers x) { return (x[0] + x[2]) + (x[1] + x[3]); }

inline uint32_t bits_of(Integers mask) {
  return static_cast<uint32_t>(reduce_add(mask & Integers{1, 2, 4, 8}));
}
inline uint32_t greater(Vector a, Vector b) { return bits_of(a > b); }
inline uint32_t greater_equal(Vector a, Vector b) { return bits_of(a >= b); }
inline Integers count_greater(Integers counts, Vector a, Vector b) { return counts - (a > b); }
inline Vector without_nan(Vector x) { return x == x ? x : splat(-__builtin_inff()); }

inline void store_compressed(float* p, uint32_t bits, Vector x) {
  for (int i = 0, n = 0; i < kLanes; ++i) {
    p[n] = x[i];
    n += static_cast<int>(bits >> i & 1);
  }
}
inline void store_compressed(int32_t* p, uint32_t bits, Integers x) {
  for (int i = 0, n = 0; i < kLanes; ++i) {
    p[n] = x[i];
    n += static_cast<int>(bits >> i & 1);
  }
}

}  // namespace
}  // namespace cpattn::kernels
