// SPDX-License-Identifier: Apache-2.0
#pragma once

// The contract of a matrix engine: a struct of static functions over one format of operands, for
// the two products of attention. Float32Engine (gemm-inl.h) is the shortest; Bfloat16Engine is
// written for AVX-512 (gemm_bf16-inl.h) and for NEON (gemm_neonbf16-inl.h). PackedLoop and
// InPlaceLoop check their engine against these concepts.
//
// A product takes kDepthStep neighbours along the depth at once, which therefore are contiguous
// in a panel: with k = kDepthStep, row r and column c of a panel are at
// panel[r / k * k * kPanel + c * k + r % k].
//
//   Operand         the type of elements of rows and panels
//   Pack            operands of one product: kDepthStep for every lane, a lane per column
//   kDepthStep      a power of two, at most 16: dimensions come in multiples of 16
//
//   load_columns(p)         the operands p[0 .. kDepthStep * kLanes) of a panel
//   splat_row(p)            the operands p[0 .. kDepthStep) of a row, in every lane
//   multiply_add(a, b, sum)
//       In every lane: sum, plus the products of the kDepthStep pairs. `a` is of queries or
//       probabilities, `b` of keys or values. A chain of n products is off by no more than
//       (n + 2) * 2^-24 of the sum of their magnitudes, as in float32; subnormal numbers may
//       count as 0. NaN and infinities give the results of float32. Lanes are independent.
//   kTakesQueries<T>        whether numbers of type T in memory are operands
//   pack_query<T>(source, dim, row)
//       `dim` numbers as operands, dim being a multiple of 16. An engine is used for types T
//       whose numbers are all operands: this function and those below round nothing.
//   pack_keys<T>(rows, begin, end, dim, first_row, panel_size, panels)
//       Packs the keys rows[begin .. end) as columns begin, begin + 1, ... of the panels, which
//       are panel_size operands apart: their `dim` numbers become the panel rows from first_row
//       on. begin is a multiple of kKeyGranule. Columns from `end` up to the next multiple of
//       kKeyGranule become zeros. Rows are readable up to `dim` and need no alignment. After the
//       last granule rows[] has the addresses of one granule more, to prefetch, not to read.
//   pack_values<T>(rows, begin, end, dim, panel_size, panels, not_finite)
//       Packs the values rows[begin .. end) as panel rows begin, begin + 1, ...: their `dim`
//       numbers become the columns. Otherwise like pack_keys(). Lists the keys with an infinity
//       or NaN in not_finite, and returns their number, at most kKeyGranule.
//   multiply<kRows, kVectors, kAccumulate>(a, lda, panel, depth, c, ldc)
//       Only for an instruction that multiplies several rows and columns, which the three
//       functions above cannot express: the product of `multiply` in gemm-inl.h. A product
//       of the three then has as many operations as if its lanes were columns. Only packed loops
//       take such an engine.
//   probability(p)          the number of an operand, as float32
//
// Beside the struct is store_probabilities(p, a, b), which stores the 2 * kLanes numbers of two
// vectors as operands from p on, rounded to nearest even; NaN stays NaN. Softmax finds it by the
// type of p, which is TwoParts for weights of two parts. load(p) of the vector layer reads
// operands back.
#include "kernels/vector/contract-inl.h"

namespace cpattn::kernels {
namespace {

/// Argument-dependent lookup finds no function for float: this one is declared before softmax.
inline void store_probabilities(float* p, Vector a, Vector b) {
  store(p, a);
  store(p + kLanes, b);
}

/// Parts of a weight that is not rounded to an operand: they add up to the weight, except for 2^-15
/// of it.
template <class Engine>
constexpr int kWeightParts = sizeof(typename Engine::Operand) < sizeof(float) ? 2 : 1;

/// The place of weights that are sums of two bfloat16 operands, the second `distance` after the
/// first. The first is nearest to the weight times `room`: 1, or kRoomAbove, with which both
/// operands of a positive weight are positive, so that infinite values stay infinite. Rounding adds
/// at most 2^-8 of it.
template <class Operand>
struct TwoParts {
  Operand* first;
  int64_t distance;
  float room;
  TwoParts operator+(int64_t n) const { return {first + n, distance, room}; }
};
constexpr float kRoomAbove = 1 - 0x1p-8F;

template <class Operand>
void store_probabilities(TwoParts<Operand> p, Vector a, Vector b) {
  store_probabilities(p.first, mul(a, splat(p.room)), mul(b, splat(p.room)));
  Operand* rest = p.first + p.distance;
  store_probabilities(rest, sub(a, load(p.first)), sub(b, load(p.first + kLanes)));
}

/// The place of weights of kParts parts that are `distance` apart.
template <int kParts, class Operand>
auto weights_at(Operand* p, int64_t distance, float room = 1) {
  if constexpr (kParts == 1) {
    return p;
  } else {
    return TwoParts<Operand>{p, distance, room};
  }
}

/// The weight at p.
template <class Engine, int kParts>
float weight_of(const typename Engine::Operand* p, int64_t distance) {
  float sum = 0;
  for (int part = 0; part < kParts; ++part) sum += Engine::probability(p + part * distance);
  return sum;
}

/// Multiplies n weights at p, n a multiple of 2 * kLanes. A weight of 0 stays 0 for any factor.
template <int kParts, class Operand>
void multiply_weights(Operand* p, int64_t distance, const float* factors, int64_t n) {
  const auto multiplied = [&](int64_t i) {
    Vector x = load(p + i);
    if constexpr (kParts == 2) x = add(x, load(p + distance + i));
    return select(greater(x, splat(0.0F)), mul(x, load(factors + i)), splat(0.0F));
  };
  for (int64_t i = 0; i < n; i += 2 * kLanes) {
    const Vector a = multiplied(i), b = multiplied(i + kLanes);
    store_probabilities(weights_at<kParts>(p, distance, kRoomAbove) + i, a, b);
  }
}

/// An engine for products with panels.
template <class Engine>
concept ProductEngine = requires {
  typename Engine::Operand;
  typename Engine::Pack;
  requires Engine::kDepthStep >= 1 && 16 % Engine::kDepthStep == 0;
  static_cast<typename Engine::Pack (*)(const typename Engine::Operand*)>(&Engine::load_columns);
  static_cast<typename Engine::Pack (*)(const typename Engine::Operand*)>(&Engine::splat_row);
};

/// An engine with its own product of several rows and a panel.
template <class Engine>
concept HasTileProduct = requires(typename Engine::Operand* p, float* c, int64_t stride, int n) {
  Engine::template multiply<1, 1, false>(p, stride, p, n, c, stride);
};

/// An engine for the two products of attention, with queries, keys and values of type T.
template <class Engine, class T>
concept MatrixEngine = ProductEngine<Engine> && requires(
                                                    typename Engine::Pack pack,
                                                    typename Engine::Operand* operands,
                                                    Vector vector,
                                                    const T* source,
                                                    const char* const* rows,
                                                    int n,
                                                    int64_t panel_size,
                                                    int* keys
                                                ) {
  requires Engine::template kTakesQueries<T> || !Engine::template kTakesQueries<T>;
  vector = Engine::multiply_add(pack, pack, vector);
  Engine::pack_query(source, n, operands);
  Engine::template pack_keys<T>(rows, n, n, n, n, panel_size, operands);
  n = Engine::template pack_values<T>(rows, n, n, n, panel_size, operands, keys);
  static_cast<float (*)(const typename Engine::Operand*)>(&Engine::probability);
  store_probabilities(operands, vector, vector);
};

}  // namespace
}  // namespace cpattn::kernels
