// SPDX-License-Identifier: Apache-2.0
#pragma once

// The merge of rows of several partial results; see KernelTable::merge_row. Needs the vector layer
// included first.
#include "kernels/boundary/attention_kernel.h"
#include "kernels/vector/contract-inl.h"

namespace cpattn::kernels {
namespace {

/// Merges kVectors vectors, whose sums stay in registers; part(i) points to those of a part.
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
