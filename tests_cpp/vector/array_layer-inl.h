// SPDX-License-Identifier: Apache-2.0
#pragma once

// A vector layer of plain arrays, written from contract-inl.h alone: with it the loops of the
// kernels show that they need no more than that.
#include <math.h>
#include <stdint.h>

#include "kernels/vector/elements-inl.h"

namespace cpattn::kernels {
namespace {

constexpr int kLanes = 4;
constexpr int kPanelVectors = 2;
constexpr int kCodes = 8;

struct Vector {
  float at[kLanes];
};
struct Integers {
  int32_t at[kLanes];
};

inline float from_bits(uint32_t bits) {
  float x;
  __builtin_memcpy(&x, &bits, sizeof x);
  return x;
}
inline uint32_t to_bits(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, sizeof bits);
  return bits;
}

/// A number of few bits: sign, exponent with this bias, significand of so many bits.
inline float number_of(uint32_t sign, int exponent, uint32_t significand, int bits, int bias) {
  const double fraction = significand + (exponent == 0 ? 0.0 : ldexp(1.0, bits));
  const double size = ldexp(fraction, (exponent == 0 ? 1 : exponent) - bias - bits);
  return static_cast<float>(sign != 0 ? -size : size);
}
inline float widen(float x) { return x; }
inline float widen(int8_t x) { return x; }
inline float widen(Bfloat16 x) { return from_bits(uint32_t{x.bits} << 16); }
inline float widen(Half x) {
  const int exponent = x.bits >> 10 & 31;
  const uint32_t significand = x.bits & 0x3ffU;
  if (exponent < 31) return number_of(x.bits & 0x8000U, exponent, significand, 10, 15);
  if (significand != 0) return NAN;
  return (x.bits & 0x8000U) != 0 ? -INFINITY : INFINITY;
}
inline float widen(Float8 x) {
  if ((x.bits & 0x7f) == 0x7f) return NAN;
  return number_of(x.bits & 0x80U, x.bits >> 3 & 15, x.bits & 7U, 3, 7);
}
inline float widen(Float8E5M2 x) { return widen(Half{static_cast<uint16_t>(x.bits << 8)}); }

inline void narrow(float x, float* p) { *p = x; }
inline void narrow(float x, int8_t* p) { *p = static_cast<int8_t>(nearbyintf(x)); }
/// The code of the number nearest to |x|, of two the even one, in a format whose normal numbers
/// begin with 2^least and whose significand has so many bits.
inline uint32_t rounded_code(float x, int least, int bits) {
  int exponent;
  frexpf(fabsf(x), &exponent);
  exponent = exponent - 1 < least || x == 0 ? least : exponent - 1;
  // In units of the last place: from 2^bits on, or less where the number is subnormal.
  const auto units = static_cast<uint32_t>(nearbyint(ldexp(fabs(double{x}), bits - exponent)));
  return (static_cast<uint32_t>(exponent - least) << bits) + units;
}
inline void narrow(float x, Half* p) {
  const uint32_t size = isnan(x)               ? 0x7e00
                        : fabsf(x) >= 65520.0F ? 0x7c00
                                               : rounded_code(x, -14, 10);
  p->bits = static_cast<uint16_t>(size | (signbit(x) ? 0x8000 : 0));
}
inline void narrow(float x, Float8* p) {
  p->bits = static_cast<uint8_t>(rounded_code(x, -6, 3) | (signbit(x) ? 0x80 : 0));
}
inline void narrow(float x, Float8E5M2* p) {
  const uint32_t size = isnan(x) ? 0x7e : fabsf(x) >= 61440.0F ? 0x7c : rounded_code(x, -14, 2);
  p->bits = static_cast<uint8_t>(size | (signbit(x) ? 0x80 : 0));
}
inline void narrow(float x, Bfloat16* p) {
  const uint32_t bits = to_bits(x);
  const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  p->bits = static_cast<uint16_t>(isnan(x) ? 0x7fc0 : rounded);
}

template <class Function>
Vector each(Function function) {
  Vector result;
  for (int i = 0; i < kLanes; ++i) result.at[i] = function(i);
  return result;
}

inline Vector splat(float x) {
  return each([=](int) { return x; });
}
template <class T>
Vector load(const T* p) {
  return each([=](int i) { return widen(p[i]); });
}
template <class T>
void store(T* p, Vector x) {
  for (int i = 0; i < kLanes; ++i) narrow(x.at[i], p + i);
}
inline Vector load_quad(const float* p) {
  return each([=](int i) { return p[i % 4]; });
}

inline Vector add(Vector a, Vector b) {
  return each([&](int i) { return a.at[i] + b.at[i]; });
}
inline Vector sub(Vector a, Vector b) {
  return each([&](int i) { return a.at[i] - b.at[i]; });
}
inline Vector mul(Vector a, Vector b) {
  return each([&](int i) { return a.at[i] * b.at[i]; });
}
inline Vector div(Vector a, Vector b) {
  return each([&](int i) { return a.at[i] / b.at[i]; });
}
inline Vector fma(Vector a, Vector b, Vector c) {
  return each([&](int i) { return fmaf(a.at[i], b.at[i], c.at[i]); });
}
inline Vector max(Vector a, Vector b) {
  return each([&](int i) { return a.at[i] > b.at[i] ? a.at[i] : b.at[i]; });
}
inline Vector min(Vector a, Vector b) {
  return each([&](int i) { return a.at[i] < b.at[i] ? a.at[i] : b.at[i]; });
}
inline float reduce_add(Vector x) {
  float sum = 0;
  for (float lane : x.at) sum += lane;
  return sum;
}
inline float reduce_max(Vector x) {
  float largest = x.at[0];
  for (float lane : x.at) largest = lane > largest ? lane : largest;
  return largest;
}
inline Vector split_exponent(Vector x, Vector& rest) {
  rest = each([&](int i) { return isinf(x.at[i]) ? 0.0F : x.at[i] - floorf(x.at[i]); });
  return x;
}
inline Vector scale_by_power(Vector p, Vector exponent) {
  return each([&](int i) {
    return exponent.at[i] < kLeastExponent ? 0.0F : p.at[i] * exp2f(floorf(exponent.at[i]));
  });
}

inline Vector select(uint32_t mask, Vector x, Vector other) {
  return each([&](int i) { return (mask >> i & 1) != 0 ? x.at[i] : other.at[i]; });
}
inline void transpose(Vector* rows) {
  for (int i = 0; i < kLanes; ++i) {
    for (int j = 0; j < i; ++j) {
      const float x = rows[i].at[j];
      rows[i].at[j] = rows[j].at[i];
      rows[j].at[i] = x;
    }
  }
}
inline Vector sums_of_quads(Vector a, Vector b, Vector c, Vector d) {
  const Vector* sources[] = {&a, &b, &c, &d};
  return each([&](int i) {
    const float* quad = sources[i % 4]->at + i / 4 * 4;
    return quad[0] + quad[1] + quad[2] + quad[3];
  });
}
template <int kDistance>
Vector exchange(Vector x) {
  return each([&](int i) { return x.at[i ^ kDistance]; });
}

inline void expand(const Float8* p, Bfloat16* out) {
  for (int i = 0; i < kCodes; ++i) narrow(widen(p[i]), out + i);
}
inline void expand(const Float8* p, Vector scale, Bfloat16* out) {
  for (int i = 0; i < kCodes; ++i) narrow(widen(p[i]) * scale.at[i % kLanes], out + i);
}

inline Integers load(const int32_t* p) {
  Integers x;
  __builtin_memcpy(&x, p, sizeof x);
  return x;
}
inline void store(int32_t* p, Integers x) { __builtin_memcpy(p, &x, sizeof x); }
inline Integers ascending(int32_t first) {
  Integers x;
  for (int i = 0; i < kLanes; ++i) x.at[i] = first + i;
  return x;
}
inline int32_t reduce_add(Integers x) {
  int32_t sum = 0;
  for (int32_t lane : x.at) sum += lane;
  return sum;
}
inline uint32_t greater(Vector a, Vector b) {
  uint32_t mask = 0;
  for (int i = 0; i < kLanes; ++i) mask |= uint32_t{a.at[i] > b.at[i]} << i;
  return mask;
}
inline uint32_t greater_equal(Vector a, Vector b) {
  uint32_t mask = 0;
  for (int i = 0; i < kLanes; ++i) mask |= uint32_t{a.at[i] >= b.at[i]} << i;
  return mask;
}
inline Integers count_greater(Integers counts, Vector a, Vector b) {
  for (int i = 0; i < kLanes; ++i) counts.at[i] += a.at[i] > b.at[i] ? 1 : 0;
  return counts;
}
inline Vector without_nan(Vector x) {
  return each([&](int i) { return isnan(x.at[i]) ? -INFINITY : x.at[i]; });
}
template <class T, class Lanes>
void store_lanes(T* p, uint32_t mask, const Lanes& x) {
  for (int i = 0, n = 0; i < kLanes; ++i) {
    if ((mask >> i & 1) != 0) p[n++] = x.at[i];
  }
}
inline void store_compressed(float* p, uint32_t mask, Vector x) { store_lanes(p, mask, x); }
inline void store_compressed(int32_t* p, uint32_t mask, Integers x) { store_lanes(p, mask, x); }

}  // namespace
}  // namespace cpattn::kernels
