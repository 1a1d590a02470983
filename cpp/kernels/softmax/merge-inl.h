// SPDX-License-Identifier: Apache-2.0
#pragma once

// The merge of rows of several partial results; see KernelTable::merge_row. Needs the vector layer
// included first.
#include "kernels/boundary/attention_kernel.h"
#include "kernels/softmax/softmax-inl.h"
#include "kernels/vector/contract-inl.h"

namespace cpattn::kernels {
namespace {

/// log(1 + w) for w in [0, 1], by the series of the inverse hyperbolic tangent of w / (2 + w),
/// which is at most 1/3: the omitted terms are below the rounding of float32.
inline Vector log1p_of_weight(Vector w) {
  const Vector z = div(w, add(splat(2.0F), w));
  const Vector base = max(splat(0x1p-50F), z);  // whose square is a normal number
  const Vector square = mul(base, base);
  Vector sum = splat(2.0F / 13);
#pragma GCC unroll 6
  for (int odd = 11; odd >= 1; odd -= 2)
    sum = fma(sum, square, splat(2.0F / static_cast<float>(odd)));
  return mul(z, sum);
}

inline void merge_lse(
    float* lse, const float* next, MergeWeights* weights, int64_t stride, int num_heads
) {
  const Vector none = splat(-__builtin_inff());
  for (int begin = 0; begin < num_heads; begin += kLanes) {
    const Vector a = load(lse + begin), b = load(next + begin);
    const uint32_t is_larger = greater_equal(a, b) | ~greater_equal(b, b);
    const Vector larger = select(is_larger, a, b), smaller = select(is_larger, b, a);
    const uint32_t is_empty = greater_equal(none, larger);
    const Vector below = mul(sub(smaller, larger), splat(kLog2E));
    const Vector weight = exp2_less_half<6>(add(below, splat(0.5F)));  // beside 1
    const Vector total = add(splat(1.0F), weight);
    const Vector zero = splat(0.0F);
    const Vector most = select(is_empty, zero, div(splat(1.0F), total));
    const Vector rest = select(is_empty, zero, div(weight, total));
    store(lse + begin, select(is_empty, a, add(larger, log1p_of_weight(weight))));
    float of_sum[kLanes], of_part[kLanes];
    store(of_sum, select(is_larger, most, rest));
    store(of_part, select(is_larger, rest, most));
    for (int h = begin; h < begin + kLanes && h < num_heads; ++h) {
      weights[h * stride] = {of_sum[h - begin], of_part[h - begin]};
    }
  }
}

/// Merges kVectors vectors, whose sums stay in registers; part(i) points to the vectors of part i.
template <int kVectors, class T, class Part>
void merge_vectors(Part part, const MergeWeights* weights, int64_t num_parts, T* out) {
  Vector sum[kVectors];
  for (int v = 0; v < kVectors; ++v) {
    sum[v] = weights[0].part == 0 ? splat(0.0F) : load(part(0) + v * kLanes);
  }
  for (int64_t i = 1; i < num_parts; ++i) {
    const MergeWeights weight = weights[i];
    const T* const next = part(i);
    if (weight.sum != 0 && weight.part != 0) [[likely]] {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        const Vector left = mul(sum[v], splat(weight.sum));
        sum[v] = fma(load(next + v * kLanes), splat(weight.part), left);
      }
      continue;
    }
    for (int v = 0; v < kVectors; ++v) {
      const Vector left = weight.sum == 0 ? splat(0.0F) : mul(sum[v], splat(weight.sum));
      sum[v] = weight.part == 0 ? left : fma(load(next + v * kLanes), splat(weight.part), left);
    }
  }
  for (int v = 0; v < kVectors; ++v) store(out + v * kLanes, sum[v]);
}

template <class T>
void merge_row(
    const void* const* parts, const MergeWeights* weights, int64_t num_parts, void* out, int64_t n
) {
  constexpr int kVectors = 4;
  T* const to = static_cast<T*>(out);
  int64_t at = 0;
  const auto part = [&](int64_t i) { return static_cast<const T*>(parts[i]) + at; };
  for (; at + kVectors * kLanes <= n; at += kVectors * kLanes) {
    merge_vectors<kVectors>(part, weights, num_parts, to + at);
  }
  for (; at + kLanes <= n; at += kLanes) merge_vectors<1>(part, weights, num_parts, to + at);
  if (at < n) {
    const int64_t bytes = (n - at) * static_cast<int64_t>(sizeof(T));
    T tail[kLanes] = {};
    const auto part_of_tail = [&](int64_t i) {
      __builtin_memcpy(tail, part(i), bytes);
      return static_cast<const T*>(tail);
    };
    T merged[kLanes];
    merge_vectors<1>(part_of_tail, weights, num_parts, merged);
    __builtin_memcpy(to + at, merged, bytes);
  }
}

}  // namespace
}  // namespace cpattn::kernels
