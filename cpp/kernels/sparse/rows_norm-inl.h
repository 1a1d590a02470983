// SPDX-License-Identifier: Apache-2.0
#pragma once

// RMS norm, Hadamard transform and dequantisation of rows, in float32 with one rounding at the end.
// Needs the vector layer included first.
#include "kernels/boundary/rows_kernel.h"
#include "kernels/vector/tails-inl.h"

namespace cpattn::kernels {
namespace {

/// The numbers are added in four partial sums, always in the same order.
template <class T>
float sum_of_squares(const T* x, int64_t n) {
  Vector sums[4] = {splat(0.0F), splat(0.0F), splat(0.0F), splat(0.0F)};
  int64_t i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
    for (int j = 0; j < 4; ++j) {
      const Vector v = load(x + i + j * kLanes);
      sums[j] = fma(v, v, sums[j]);
    }
  }
  for (; i < n; i += kLanes) {
    const Vector v = load_some(x + i, n - i);
    sums[0] = fma(v, v, sums[0]);
  }
  return reduce_add(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
}

template <class T>
void rms_norm(
    const void* x, const float* weight, const float* bias, int64_t n, float eps, void* out
) {
  const T* from = static_cast<const T*>(x);
  const float mean = sum_of_squares(from, n) / static_cast<float>(n);
  const Vector factor = splat(1 / __builtin_sqrtf(mean + eps));
  for (int64_t i = 0; i < n; i += kLanes) {
    const Vector v = mul(load_some(from + i, n - i), factor);
    const Vector w = load_some(weight + i, n - i);
    const Vector y = bias == nullptr ? mul(v, w) : fma(v, w, load_some(bias + i, n - i));
    store_some(static_cast<T*>(out) + i, y, n - i);
  }
}

template <class T>
void widen_row(const void* x, int64_t n, float* out) {
  const T* from = static_cast<const T*>(x);
  for (int64_t i = 0; i < n; i += kLanes) {
    store_some(out + i, load_some(from + i, n - i), n - i);
  }
}

template <class T>
void dequantize_int8(
    const int8_t* codes, const float* scale, const float* offset, int64_t n, void* out
) {
  for (int64_t i = 0; i < n; i += kLanes) {
    Vector x = load_some(codes + i, n - i);
    if (offset != nullptr) x = add(x, load_some(offset + i, n - i));
    store_some(static_cast<T*>(out) + i, mul(x, load_some(scale + i, n - i)), n - i);
  }
}

/// Sums and differences of lanes kDistance apart.
template <int kDistance>
Vector butterfly(Vector x) {
  constexpr uint32_t kUpper = 0xffffffffU / ((1U << kDistance) + 1) << kDistance;
  return fma(x, select(kUpper, splat(-1.0F), splat(1.0F)), exchange<kDistance>(x));
}

/// The butterflies of all distances below n within a vector.
template <int kDistance = 1>
Vector butterflies(Vector x, int64_t n) {
  if constexpr (kDistance < kLanes) {
    if (kDistance < n) return butterflies<2 * kDistance>(butterfly<kDistance>(x), n);
  }
  return x;
}

/// Vectors whose sums and differences stay in registers.
constexpr int kHadamardVectors = 8;

template <class T>
void hadamard_block(const T* x, float* out) {
  Vector v[kHadamardVectors];
  for (int i = 0; i < kHadamardVectors; ++i) v[i] = butterflies(load(x + i * kLanes), kLanes);
  for (int d = 1; d < kHadamardVectors; d *= 2) {
    for (int i = 0; i < kHadamardVectors; ++i) {
      if ((i & d) != 0) continue;
      const Vector a = v[i];
      v[i] = add(a, v[i + d]);
      v[i + d] = sub(a, v[i + d]);
    }
  }
  for (int i = 0; i < kHadamardVectors; ++i) store(out + i * kLanes, v[i]);
}

template <class T>
void hadamard(const void* x, int64_t count, int64_t n, float scale, void* out, float* scratch) {
  constexpr int64_t kBlock = int64_t{kHadamardVectors} * kLanes;
  const T* from = static_cast<const T*>(x);
  const bool blocks = n >= kBlock;
  if (blocks) {
    for (int64_t i = 0; i < n; i += kBlock) hadamard_block(from + i, scratch + i);
  } else {
    for (int64_t i = 0; i < count; i += kLanes) {
      store(scratch + i, butterflies(load(from + i), n));
    }
  }
  for (int64_t d = blocks ? kBlock : kLanes; d < n; d *= 2) {
    for (int64_t i = 0; i < count; i += 2 * d) {
      for (int64_t j = i; j < i + d; j += kLanes) {
        const Vector a = load(scratch + j);
        const Vector b = load(scratch + j + d);
        store(scratch + j, add(a, b));
        store(scratch + j + d, sub(a, b));
      }
    }
  }
  for (int64_t i = 0; i < count; i += kLanes) {
    store(static_cast<T*>(out) + i, mul(load(scratch + i), splat(scale)));
  }
}

}  // namespace
}  // namespace cpattn::kernels
