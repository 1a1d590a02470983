// SPDX-License-Identifier: Apache-2.0
#pragma once

// The contract of a vector layer: portable-inl.h, avx2-inl.h, avx512-inl.h and neon-inl.h each
// implement its functions for their registers, and all other kernels use them. A file that is
// compiled for one instruction set includes one layer first; this header, which all users of a
// layer include, then checks the layer against the list below, by name and type.
//
// A layer includes elements-inl.h and C headers only, and puts into the namespace:
//
//   Vector          kLanes floats
//   kLanes          4, 8 or 16: rows of scores are taken in pairs of vectors, granules of 32
//   kPanelVectors   2 or 4, the vectors of a packed panel: the micro-kernel of gemm-inl.h has
//                   6 x kPanelVectors sums, which should fit into the registers
//   Integers        kLanes numbers of type int32_t
//   kCodes          codes that expand() takes at a time; divides 32
//
// Rules that hold unless a function says otherwise:
//
// - Pointers need only the alignment of their element. Every load reads, and every store writes,
//   kLanes elements.
// - Arithmetic is float32, rounded to nearest even, the processor's default. Subnormal results
//   may become 0, and subnormal operands may count as 0, if the calling thread has set that mode.
// - A NaN operand makes a NaN result, of any sign and payload.
// - Bit i of a mask belongs to lane i. Functions that return a mask leave the bits from kLanes on
//   zero, which store_compressed() requires; select() ignores these bits.
//
// All functions are needed: the last two groups only by kernels/sparse and kernels/kv, the rest by
// kernels/attention too. avx512-inl.h has more: transpose() of integers and expand() of a register
// of codes, for engines and tiles written only for AVX-512, and load_two().
#include <stdint.h>

#include "kernels/vector/elements-inl.h"

namespace cpattn::kernels {
namespace {

static_assert(kLanes == 4 || kLanes == 8 || kLanes == 16);
static_assert(kPanelVectors == 2 || kPanelVectors == 4);
static_assert(32 % kCodes == 0);

/// The functions of the layer with their types: a layer that lacks one does not compile.
struct VectorLayer {
  // --- To and from memory.

  /// x in every lane.
  Vector (*splat)(float x) = &kernels::splat;
  /// Numbers of every storage type as float32, exact. The thread's handling of subnormal numbers
  /// does not change the results for 8 and 16 bits.
  Vector (*load_float32)(const float* p) = &kernels::load;
  Vector (*load_float16)(const Half* p) = &kernels::load;
  Vector (*load_bfloat16)(const Bfloat16* p) = &kernels::load;
  void (*store_float32)(float* p, Vector x) = &kernels::store;
  /// Rounded to nearest even. Magnitudes beyond the largest number become infinities, and a NaN
  /// stays one.
  void (*store_float16)(Half* p, Vector x) = &kernels::store;
  void (*store_bfloat16)(Bfloat16* p, Vector x) = &kernels::store;
  /// The floats p[0..4), repeated in every four lanes.
  Vector (*load_quad)(const float* p) = &kernels::load_quad;

  // --- Arithmetic, lane by lane.

  Vector (*add)(Vector a, Vector b) = &kernels::add;
  Vector (*sub)(Vector a, Vector b) = &kernels::sub;
  Vector (*mul)(Vector a, Vector b) = &kernels::mul;
  Vector (*div)(Vector a, Vector b) = &kernels::div;
  /// a * b + c, rounded once, or after the product too.
  Vector (*fma)(Vector a, Vector b, Vector c) = &kernels::fma;
  /// The larger (smaller) of both. A NaN in b is kept; for a NaN in a the result is b or NaN. So
  /// max(bound, x) keeps a NaN of x, and max(x, sum) may drop it.
  Vector (*max)(Vector a, Vector b) = &kernels::max;
  Vector (*min)(Vector a, Vector b) = &kernels::min;
  /// The sum of all lanes, in an order that each layer fixes.
  float (*reduce_sum)(Vector x) = &kernels::reduce_add;
  /// The largest lane; any number, or NaN, if a lane is NaN.
  float (*reduce_max)(Vector x) = &kernels::reduce_max;
  /// Two functions that together scale p by a power of two, for x <= 127: p * 2^(x - rest) is
  /// scale_by_power(p, split_exponent(x, rest)), with rest in [0, 1]. For x below kLeastExponent
  /// the result is 0, so that no p from 2^-20 on makes a subnormal number, and for x = NaN rest is
  /// NaN. Above 127 the result has no meaning, and x = +inf must not trap. The layer chooses the
  /// value between them: an integer, or x itself.
  Vector (*split_exponent)(Vector x, Vector& rest) = &kernels::split_exponent;
  Vector (*scale_by_power)(Vector p, Vector exponent) = &kernels::scale_by_power;

  // --- Lanes moved.

  /// x where the bit of the lane is set, `other` elsewhere.
  Vector (*select)(uint32_t mask, Vector x, Vector other) = &kernels::select;
  /// Transposes rows[0..kLanes) in place.
  void (*transpose)(Vector* rows) = &kernels::transpose;
  /// Sums, in lanes 4 i to 4 i + 3, of those four lanes of a, of b, of c and of d.
  Vector (*sums_of_quads)(Vector a, Vector b, Vector c, Vector d) = &kernels::sums_of_quads;
  /// Lanes i and i ^ distance exchanged, for every power of two below kLanes.
  Vector (*exchange)(Vector x) = &kernels::exchange<1>;
  Vector (*exchange_farthest)(Vector x) = &kernels::exchange<kLanes / 2>;

  // --- Codes of 8 bits.

  /// Converts to float32, exactly.
  Vector (*load_float8)(const Float8* p) = &kernels::load;
  Vector (*load_float8_e5m2)(const Float8E5M2* p) = &kernels::load;
  Vector (*load_int8)(const int8_t* p) = &kernels::load;
  /// Rounds to nearest even, for numbers of at most 448 in size (from -128 to 127). Results for
  /// other numbers and NaN are unspecified, except that -480 becomes a NaN of Float8.
  void (*store_float8)(Float8* p, Vector x) = &kernels::store;
  void (*store_int8)(int8_t* p, Vector x) = &kernels::store;
  /// Rounds to nearest even. Magnitudes from 61440 on, half-way from the largest number to 2^16,
  /// become infinities, and a NaN stays one.
  void (*store_float8_e5m2)(Float8E5M2* p, Vector x) = &kernels::store;
  /// kCodes codes as bfloat16: exact, or times `scale` in float32 and rounded to nearest even. A
  /// NaN among the scales has no low bits set, as __builtin_nanf("").
  void (*expand)(const Float8* p, Bfloat16* out) = &kernels::expand;
  void (*expand_scaled)(const Float8* p, Vector scale, Bfloat16* out) = &kernels::expand;

  // --- Integers, comparisons and compression, for the selection of the largest.

  Integers (*load_integers)(const int32_t* p) = &kernels::load;
  void (*store_integers)(int32_t* p, Integers x) = &kernels::store;
  /// first, first + 1, ...
  Integers (*ascending)(int32_t first) = &kernels::ascending;
  int32_t (*reduce_integers)(Integers x) = &kernels::reduce_add;
  /// A mask of the lanes in which a > b (a >= b); lanes with a NaN are not in it.
  uint32_t (*greater)(Vector a, Vector b) = &kernels::greater;
  uint32_t (*greater_equal)(Vector a, Vector b) = &kernels::greater_equal;
  /// counts, plus 1 in the lanes in which a > b.
  Integers (*count_greater)(Integers counts, Vector a, Vector b) = &kernels::count_greater;
  /// x, with -inf for NaN.
  Vector (*without_nan)(Vector x) = &kernels::without_nan;
  /// Stores the lanes of the mask without gaps, in their order. The rest of p[0..kLanes) becomes
  /// anything.
  void (*store_compressed_floats)(float* p, uint32_t mask, Vector x) = &kernels::store_compressed;
  void (*store_compressed_integers)(int32_t* p, uint32_t mask, Integers x) =
      &kernels::store_compressed;
};

}  // namespace
}  // namespace cpattn::kernels
