// SPDX-License-Identifier: Apache-2.0
#pragma once

// Operands of products with keys and values that are not packed. Needs the vector
// layer included first.
#include "kernels/engines/gemm-inl.h"

namespace cpattn::kernels {
namespace {

/// An engine's loads from rows of type T that are not packed, which InPlaceLoop needs beside
/// a MatrixEngine. Q K^T works on quads, the operands of four products, which are 16 bytes of
/// neighbouring dimensions: a key's quad, repeated in a vector, meets the quads of four queries.
/// P V works on values in memory order.
///
///   kWidens             whether keys have to become operands before they are used: by
///                       widen(row, dim, operands). If not, T is the engine's Operand.
///   load_quad(p)        the 4 * kDepthStep operands from p on, in every four lanes
///   load_values<kVectors>(rows, d, columns)
///       kVectors * kLanes columns, from dimension d on, of the kDepthStep values whose
///       addresses are in rows[]: columns[j] equals the result of load_columns() on a panel.
///       kVectors is at most kPanelVectors. Row columns are read up to a multiple of 16.
template <class T, class Engine>
struct InPlace;

template <class Engine, class T>
concept InPlaceEngine = requires(const char* const* rows, int d, typename Engine::Pack* columns) {
  requires InPlace<T, Engine>::kWidens || !InPlace<T, Engine>::kWidens;
  static_cast<typename Engine::Pack (*)(const typename Engine::Operand*)>(
      &InPlace<T, Engine>::load_quad
  );
  InPlace<T, Engine>::template load_values<1>(rows, d, columns);
  InPlace<T, Engine>::template load_values<kPanelVectors>(rows, d, columns);
};

template <class T>
struct InPlace<T, Float32Engine> {
  static constexpr bool kWidens = sizeof(T) != sizeof(float);
  static void widen(const T* row, int dim, float* operands) {
    Float32Engine::pack_query(row, dim, operands);
  }
  static Vector load_quad(const float* p) { return kernels::load_quad(p); }

  template <int kVectors>
  static void load_values(const char* const* rows, int d, Vector* columns) {
    const T* row = reinterpret_cast<const T*>(rows[0]) + d;
#pragma GCC unroll 2
    for (int j = 0; j + 2 <= kVectors; j += 2) {
      load_two(row + j * kLanes, columns[j], columns[j + 1]);
    }
    if constexpr (kVectors % 2 == 1) columns[kVectors - 1] = load(row + (kVectors - 1) * kLanes);
  }
};

/// o += p v for kRows rows, kVectors vectors of columns from d on, and n values. The parts of p are
/// ldp apart, its rows ldp times the number of parts. values[n] is readable too.
template <class T, class Engine, int kParts, int kRows, int kVectors>
void add_columns(
    const typename Engine::Operand* p,
    int64_t ldp,
    const char* const* values,
    int n,
    int d,
    float* o,
    int64_t ldo
) {
  Vector sums[kRows][kVectors];
#pragma GCC unroll 4
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) sums[i][j] = load(o + i * ldo + j * kLanes);
  }
  for (int key = 0; key < n; key += Engine::kDepthStep) {
    typename Engine::Pack columns[kVectors];
    InPlace<T, Engine>::template load_values<kVectors>(values + key, d, columns);
#pragma GCC unroll 8
    for (int i = 0; i < kRows * kParts; ++i) {
      const auto weight = Engine::splat_row(p + i * ldp + key);
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) {
        Vector& sum = sums[i / kParts][j];
        sum = Engine::multiply_add(weight, columns[j], sum);
      }
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) store(o + i * ldo + j * kLanes, sums[i][j]);
  }
}

/// add_columns() for 1 to kPanelVectors vectors.
template <class T, class Engine, int kParts, int kRows>
[[gnu::always_inline]] inline void add_vectors(
    int vectors,
    const typename Engine::Operand* p,
    int64_t ldp,
    const char* const* values,
    int n,
    int d,
    float* o,
    int64_t ldo
) {
  switch (vectors) {
    case 1:
      return add_columns<T, Engine, kParts, kRows, 1>(p, ldp, values, n, d, o, ldo);
    case 2:
      return add_columns<T, Engine, kParts, kRows, 2>(p, ldp, values, n, d, o, ldo);
    case 3:
      return add_columns<T, Engine, kParts, kRows, 3>(p, ldp, values, n, d, o, ldo);
    default:
      return add_columns<T, Engine, kParts, kRows, kPanelVectors>(p, ldp, values, n, d, o, ldo);
  }
}

/// Calls function<kRows>(first) for tiles of rows [0, rows).
template <class Function>
void for_row_tiles(int rows, Function function) {
  int i = 0;
  for (; i + 4 <= rows; i += 4) function.template operator()<4>(i);
  if (i + 2 <= rows) {
    function.template operator()<2>(i);
    i += 2;
  }
  if (i < rows) function.template operator()<1>(i);
}

}  // namespace
}  // namespace cpattn::kernels
