// SPDX-License-Identifier: Apache-2.0
#pragma once

// The vector layer of Advanced SIMD (NEON), which every 64-bit Arm processor has: four lanes.
// contract-inl.h has the contract of its functions.
#include <arm_neon.h>
#include <stdint.h>

#include "kernels/vector/elements-inl.h"

namespace cpattn::kernels {
namespace {

using Vector = float32x4_t;
constexpr int kLanes = 4;
/// Columns of one packed panel, in vectors: 6 x 4 accumulators, 4 columns and a
/// row leave 3 of the 32 registers free.
constexpr int kPanelVectors = 4;

inline Vector splat(float x) { return vdupq_n_f32(x); }
inline Vector load(const float* p) { return vld1q_f32(p); }
inline Vector load(const Half* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(&p->bits))); }
inline Vector load(const Bfloat16* p) {
  return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(&p->bits), 16));
}
/// The four bytes at p, and zeros.
inline uint8x8_t load_bytes(const void* p) {
  uint32_t bytes;
  __builtin_memcpy(&bytes, p, sizeof bytes);
  return vcreate_u8(bytes);
}
/// Codes as float16, whose exponent is too small by 8. Bit 14 repeats the sign and is cleared;
/// adding 0x80 sets it again only for NaN, which makes a NaN of float16.
inline float16x8_t halves_of_e4m3(uint8x8_t codes) {
  const int16x8_t wide = vmovl_s8(vreinterpret_s8_u8(codes));
  const uint16x8_t half =
      vbicq_u16(vshlq_n_u16(vreinterpretq_u16_s16(wide), 7), vdupq_n_u16(0x4000));
  const uint16x8_t nan = vandq_u16(vaddq_u16(half, vdupq_n_u16(0x80)), vdupq_n_u16(0x4000));
  return vreinterpretq_f16_u16(vorrq_u16(half, nan));
}
inline Vector load(const Float8* p) {
  return vmulq_n_f32(vcvt_f32_f16(vget_low_f16(halves_of_e4m3(load_bytes(p)))), 256.0F);
}
inline void load_two(const Float8* p, Vector& first, Vector& second) {
  const float16x8_t halves = halves_of_e4m3(vld1_u8(reinterpret_cast<const uint8_t*>(p)));
  first = vmulq_n_f32(vcvt_f32_f16(vget_low_f16(halves)), 256.0F);
  second = vmulq_n_f32(vcvt_high_f32_f16(halves), 256.0F);
}
inline Vector load(const Float8E5M2* p) {
  const uint8x8_t halves = vzip1_u8(vdup_n_u8(0), load_bytes(p));  // codes are the upper bytes
  return vcvt_f32_f16(vreinterpret_f16_u8(halves));
}
inline Vector load(const int8_t* p) {
  const int16x8_t wide = vmovl_s8(vreinterpret_s8_u8(load_bytes(p)));
  return vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide)));
}
inline void store(float* p, Vector x) { vst1q_f32(p, x); }
inline void store(Half* p, Vector x) { vst1_u16(&p->bits, vreinterpret_u16_f16(vcvt_f16_f32(x))); }
inline void store(Bfloat16* p, Vector x) {
  const uint32x4_t bits = vreinterpretq_u32_f32(x);
  const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
  const uint32x4_t rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
  const uint32x4_t ordered = vceqq_f32(x, x);
  vst1_u16(&p->bits, vshrn_n_u32(vbslq_u32(ordered, rounded, vdupq_n_u32(0x7fc00000)), 16));
}
/// Stores the low bytes of four numbers.
inline void store_bytes(void* p, uint32x4_t x) {
  const uint16x4_t words = vmovn_u32(x);
  const uint8x8_t bytes = vmovn_u16(vcombine_u16(words, words));
  const uint32_t four = vget_lane_u32(vreinterpret_u32_u8(bytes), 0);
  __builtin_memcpy(p, &four, sizeof four);
}
inline void store(Float8* p, Vector x) {
  const uint32x4_t bits = vreinterpretq_u32_f32(x);
  const uint32x4_t size = vandq_u32(bits, vdupq_n_u32(0x7fffffff));
  const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 20), vdupq_n_u32(1));
  const uint32x4_t bias = vaddq_u32(odd, vdupq_n_u32(0x7ffffU - (120U << 23)));
  const uint32x4_t normal = vshrq_n_u32(vaddq_u32(size, bias), 20);
  // Adding 2^14 shifts a subnormal's bits to the bottom, rounded to even.
  const Vector magic = vdupq_n_f32(0x1p14F);
  const uint32x4_t subnormal = vsubq_u32(
      vreinterpretq_u32_f32(vaddq_f32(vabsq_f32(x), magic)), vreinterpretq_u32_f32(magic)
  );
  const uint32x4_t is_normal = vcgeq_u32(size, vdupq_n_u32(0x3c800000));
  const uint32x4_t code = vbslq_u32(is_normal, normal, subnormal);
  const uint32x4_t sign = vandq_u32(vshrq_n_u32(bits, 24), vdupq_n_u32(0x80));
  store_bytes(p, vorrq_u32(code, sign));
}
inline void store(Float8E5M2* p, Vector x) {
  const uint32x4_t bits = vreinterpretq_u32_f32(x);
  const uint32x4_t any_size = vandq_u32(bits, vdupq_n_u32(0x7fffffff));
  const uint32x4_t nan = vcgtq_u32(any_size, vdupq_n_u32(0x7f800000));
  // Numbers from 2^16 on become infinities: 2^16 gets their code by the rule of normal numbers.
  const uint32x4_t size = vminq_u32(any_size, vdupq_n_u32(0x47800000));
  const uint32x4_t odd = vandq_u32(vshrq_n_u32(size, 21), vdupq_n_u32(1));
  const uint32x4_t bias = vaddq_u32(odd, vdupq_n_u32(0xfffffU - (112U << 23)));
  const uint32x4_t normal = vshrq_n_u32(vaddq_u32(size, bias), 21);
  // Adding 2^7 shifts a subnormal's bits to the bottom, rounded to even.
  const Vector magic = vdupq_n_f32(0x1p7F);
  const uint32x4_t subnormal = vsubq_u32(
      vreinterpretq_u32_f32(vaddq_f32(vreinterpretq_f32_u32(size), magic)),
      vreinterpretq_u32_f32(magic)
  );
  const uint32x4_t is_normal = vcgeq_u32(size, vdupq_n_u32(0x38800000));
  const uint32x4_t number = vbslq_u32(is_normal, normal, subnormal);
  const uint32x4_t code = vbslq_u32(nan, vdupq_n_u32(0x7f), number);
  const uint32x4_t sign = vandq_u32(vshrq_n_u32(bits, 24), vdupq_n_u32(0x80));
  store_bytes(p, vorrq_u32(code, sign));
}
inline void store(int8_t* p, Vector x) { store_bytes(p, vreinterpretq_u32_s32(vcvtnq_s32_f32(x))); }

inline Vector add(Vector a, Vector b) { return vaddq_f32(a, b); }
inline Vector sub(Vector a, Vector b) { return vsubq_f32(a, b); }
inline Vector mul(Vector a, Vector b) { return vmulq_f32(a, b); }
inline Vector div(Vector a, Vector b) { return vdivq_f32(a, b); }
inline Vector fma(Vector a, Vector b, Vector c) { return vfmaq_f32(c, a, b); }
inline Vector max(Vector a, Vector b) { return vmaxq_f32(a, b); }
inline Vector min(Vector a, Vector b) { return vminq_f32(a, b); }
inline float reduce_add(Vector x) { return vaddvq_f32(x); }
inline float reduce_max(Vector x) { return vmaxvq_f32(x); }

/// Splits x into an integer for scale_by_power and the rest in [0, 1]. Smaller x counts as
/// kLeastExponent - 1, whose power is 0.
inline Vector split_exponent(Vector x, Vector& rest) {
  x = max(splat(kLeastExponent - 1), x);
  const Vector n = vrndmq_f32(x);
  rest = sub(x, n);
  return n;
}
/// x * 2^n for integral n up to 127, with powers below the least counted as 0.
inline Vector scale_by_power(Vector x, Vector n) {
  const int32x4_t exponent = vcvtq_s32_f32(n);
  const uint32x4_t kept = vcgeq_s32(exponent, vdupq_n_s32(static_cast<int>(kLeastExponent)));
  const int32x4_t power = vshlq_n_s32(vaddq_s32(exponent, vdupq_n_s32(127)), 23);
  return mul(x, vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_s32(power), kept)));
}

inline Vector select(uint32_t bits, Vector x, Vector other) {
  const uint32x4_t lane = {1, 2, 4, 8};
  return vbslq_f32(vtstq_u32(vdupq_n_u32(bits), lane), x, other);
}

/// 4 x 4 transpose.
inline void transpose(Vector* r) {
  const float32x4x2_t upper = vtrnq_f32(r[0], r[1]);
  const float32x4x2_t lower = vtrnq_f32(r[2], r[3]);
  r[0] = vcombine_f32(vget_low_f32(upper.val[0]), vget_low_f32(lower.val[0]));
  r[1] = vcombine_f32(vget_low_f32(upper.val[1]), vget_low_f32(lower.val[1]));
  r[2] = vcombine_f32(vget_high_f32(upper.val[0]), vget_high_f32(lower.val[0]));
  r[3] = vcombine_f32(vget_high_f32(upper.val[1]), vget_high_f32(lower.val[1]));
}

template <int kDistance>
inline Vector exchange(Vector x) {
  return kDistance == 1 ? vrev64q_f32(x) : vextq_f32(x, x, 2);
}

inline Vector load_quad(const float* p) { return load(p); }

inline Vector sums_of_quads(Vector a, Vector b, Vector c, Vector d) {
  return vpaddq_f32(vpaddq_f32(a, b), vpaddq_f32(c, d));
}

constexpr int kCodes = kLanes;
inline void expand(const Float8* p, Bfloat16* out) { store(out, load(p)); }
inline void expand(const Float8* p, Vector scale, Bfloat16* out) {
  store(out, mul(load(p), scale));
}

// Integers, comparisons and compression, for top-k selection.
using Integers = int32x4_t;

inline Integers load(const int32_t* p) { return vld1q_s32(p); }
inline void store(int32_t* p, Integers x) { vst1q_s32(p, x); }
inline Integers ascending(int32_t first) {
  const Integers lane = {0, 1, 2, 3};
  return vaddq_s32(vdupq_n_s32(first), lane);
}
inline int32_t reduce_add(Integers x) { return vaddvq_s32(x); }

inline uint32_t bits_of(uint32x4_t mask) {
  const uint32x4_t lane = {1, 2, 4, 8};
  return vaddvq_u32(vandq_u32(mask, lane));
}
inline uint32_t greater(Vector a, Vector b) { return bits_of(vcgtq_f32(a, b)); }
inline uint32_t greater_equal(Vector a, Vector b) { return bits_of(vcgeq_f32(a, b)); }
inline Integers count_greater(Integers counts, Vector a, Vector b) {
  return vsubq_s32(counts, vreinterpretq_s32_u32(vcgtq_f32(a, b)));
}
inline Vector without_nan(Vector x) {
  return vbslq_f32(vceqq_f32(x, x), x, splat(-__builtin_inff()));
}

/// The numbers of the bytes of each set of lanes, ascending.
struct CompressTable {
  uint8_t bytes[16][16] = {};
  constexpr CompressTable() {
    for (int bits = 0; bits < 16; ++bits) {
      for (int lane = 0, n = 0; lane < 4; ++lane) {
        if ((bits >> lane & 1) == 0) continue;
        for (int byte = 0; byte < 4; ++byte)
          bytes[bits][n++] = static_cast<uint8_t>(4 * lane + byte);
      }
    }
  }
};
constexpr CompressTable kCompress;

inline void store_compressed(int32_t* p, uint32_t bits, Integers x) {
  const uint8x16_t bytes = vld1q_u8(kCompress.bytes[bits]);
  store(p, vreinterpretq_s32_u8(vqtbl1q_u8(vreinterpretq_u8_s32(x), bytes)));
}
inline void store_compressed(float* p, uint32_t bits, Vector x) {
  const uint8x16_t bytes = vld1q_u8(kCompress.bytes[bits]);
  store(p, vreinterpretq_f32_u8(vqtbl1q_u8(vreinterpretq_u8_f32(x), bytes)));
}

}  // namespace
}  // namespace cpattn::kernels
