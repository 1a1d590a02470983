// SPDX-License-Identifier: Apache-2.0
#pragma once

// The factors of rows of K and V that are stored as codes. Needs the vector layer included first.
#include "kernels/rows/key_rows-inl.h"
#include "kernels/vector/elements-inl.h"

namespace cpattn::kernels {
namespace {

inline bool has_factors(const RowFactors& source) { return source.rows.data != nullptr; }

template <class T>
void read_factors(
    const AttentionTile& tile,
    const PagedRows& source,
    int head,
    int64_t first,
    int n,
    int hidden,
    float* factors
) {
  constexpr int kAtOnce = 32;
  const char* places[kMaxBlockKeys];
  const PagedRows rows = rows_of_head(source, head, sizeof(T));
  locate_visible_rows(rows, tile, first, n, hidden, sizeof(T), places);
  for (int i = 0; i < n; i += kAtOnce) {
    T numbers[kAtOnce] = {};
    for (int j = 0; j < kAtOnce && i + j < n; ++j) {
      __builtin_memcpy(&numbers[j], places[i + j], sizeof(T));
    }
    for (int j = 0; j < kAtOnce; j += kLanes) store(factors + i + j, load(numbers + j));
  }
}

/// Reads the factors of keys [first, first + n) of a KV head; factors up to the next multiple of 32
/// become zeros. No token sees the first `hidden` keys.
inline void read_factors(
    const AttentionTile& tile,
    const RowFactors& source,
    int head,
    int64_t first,
    int n,
    int hidden,
    float* factors
) {
  switch (source.type) {
    case kFloat16:
      read_factors<Half>(tile, source.rows, head, first, n, hidden, factors);
      break;
    case kBfloat16:
      read_factors<Bfloat16>(tile, source.rows, head, first, n, hidden, factors);
      break;
    default:
      read_factors<float>(tile, source.rows, head, first, n, hidden, factors);
  }
}

/// Whether the factors of n keys keep finite scores finite: none is NaN or above 1.
inline bool are_moderate(const float* factors, int n) {
  bool moderate = true;
  for (int i = 0; i < n; ++i) moderate &= __builtin_fabsf(factors[i]) <= 1.0F;
  return moderate;
}

/// row[i] *= factors[i] for i in [begin, end), which are multiples of 32.
inline void multiply_row(float* row, const float* factors, int begin, int end) {
  for (int i = begin; i < end; i += kLanes) {
    store(row + i, mul(load(row + i), load(factors + i)));
  }
}

}  // namespace
}  // namespace cpattn::kernels
