// SPDX-License-Identifier: Apache-2.0
#pragma once

// Products that slices of vector work add to sums. Needs the vector layer included first.
#include "kernels/vector/contract-inl.h"

namespace cpattn::kernels {
namespace {

/// The first column of a product with ones, pending for the sums of rows: a slice of other work
/// take()s the next kRows sums.
struct PendingColumn {
  const float* product;  // [row][16]
  float* sums;           // [row]
  int count;             // a multiple of 4

  template <int kRows>
  [[gnu::always_inline]] void take() {
    if (count == 0) return;
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) sums[i] += product[i * kLanes];
    product += kRows * kLanes;
    sums += kRows;
    count -= kRows;
  }

  void take_rest() {
    while (count > 0) take<4>();
  }
};

/// Sixteen columns of P V, pending for O, both [row][16]: a slice of other work take()s the next
/// kRows rows.
struct PendingRows {
  const float* product;
  float* output;
  int count;  // a multiple of 16

  template <int kRows>
  [[gnu::always_inline]] void take() {
    if (count == 0) return;
#pragma GCC unroll 16
    for (int i = 0; i < kRows * kLanes; i += kLanes) {
      store(output + i, add(load(output + i), load(product + i)));
    }
    product += kRows * kLanes;
    output += kRows * kLanes;
    count -= kRows;
  }

  void take_rest() {
    while (count > 0) take<4>();
  }
};

}  // namespace
}  // namespace cpattn::kernels
