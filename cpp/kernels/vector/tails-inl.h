// SPDX-License-Identifier: Apache-2.0
#pragma once

// Loads of the last numbers, which fill less than a vector. Needs the vector layer included first.
#include "kernels/vector/elements-inl.h"

namespace cpattn::kernels {
namespace {

/// Loads the next vector of n > 0 numbers that are left. Lanes beyond them are zero, and no memory
/// beyond them is read.
template <class T>
Vector load_some(const T* p, int64_t n) {
  if (n >= kLanes) return load(p);
  T padded[kLanes] = {};
  __builtin_memcpy(padded, p, n * sizeof(T));
  return load(padded);
}
template <class T>
void store_some(T* p, Vector x, int64_t n) {
  if (n >= kLanes) return store(p, x);
  T padded[kLanes];
  store(padded, x);
  __builtin_memcpy(p, padded, n * sizeof(T));
}

}  // namespace
}  // namespace cpattn::kernels
