// SPDX-License-Identifier: Apache-2.0
#pragma once

// Operands of products with keys and values that are not packed. Needs the vector
// layer included first.
#include "kernels/attention/gemm-inl.h"

namespace cpattn::kernels {
namespace {

/// What an engine loads from rows of type T. Q K^T works on quads, 16 bytes of
/// neighbouring dimensions: one of a key, repeated in a vector, meets one of each
/// of four queries.
template <class T, class Engine>
struct InPlace;

template <class T>
struct InPlace<T, Float32Engine> {
  /// Keys of another type than the operands are widened before they are used.
  static constexpr bool kWidens = sizeof(T) != sizeof(float);
  static Vector load_quad(const float* p) { return kernels::load_quad(p); }

  /// kVectors * kLanes columns from dimension d on of the value in rows[0].
  template <int kVectors>
  static void load_values(const char* const* rows, int d, Vector* columns) {
    const T* row = reinterpret_cast<const T*>(rows[0]) + d;
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) columns[j] = load(row + j * kLanes);
  }
};

/// o += p v for kRows rows, kVectors vectors of columns from d on, and n values.
/// values[n] is readable too.
template <class T, class Engine, int kRows, int kVectors>
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
#pragma GCC unroll 4
    for (int i = 0; i < kRows; ++i) {
      const auto weight = Engine::splat_row(p + i * ldp + key);
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) {
        sums[i][j] = Engine::multiply_add(weight, columns[j], sums[i][j]);
      }
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) store(o + i * ldo + j * kLanes, sums[i][j]);
  }
}

}  // namespace
}  // namespace cpattn::kernels
