// SPDX-License-Identifier: Apache-2.0
#pragma once

// Top-k of a row in memory: a sample of the row gives the first threshold.
#include "kernels/boundary/topk_kernel.h"
#include "kernels/sparse/topk-inl.h"

namespace cpattn::kernels {
namespace {

constexpr int kTopkSample = 512;
static_assert(kTopkSample % kTopkStep == 0);

/// An upper bound of the expected number of scores over the threshold, 2 k or so.
inline int64_t topk_row_capacity(int64_t k) { return 2 * topk_capacity(k); }

inline int64_t topk_scratch_bytes(int32_t k) {
  const auto entry_bytes = static_cast<int64_t>(sizeof(float) + sizeof(int32_t));
  return topk_row_capacity(k) * entry_bytes + topk_sort_bytes(k);
}

/// A threshold that about 1.5 k scores of the row are expected to exceed, estimated from evenly
/// spaced scores. Leaves the stream as it is if it would be -inf.
inline void topk_guess_threshold(TopkStream& stream, const TopkRow& row) {
  float sample[kTopkSample];
  const int64_t spacing = row.length / kTopkSample;
  const float* piece = row.scores;
  int64_t offset = 0;  // moves through the pieces, for scores with a period
  for (int i = 0; i < kTopkSample; ++i, piece += spacing) {
    const float x = piece[offset];
    sample[i] = x == x ? x : -__builtin_inff();
    if (++offset == spacing) offset = 0;
  }
  const double expected = static_cast<double>(row.topk) * kTopkSample / row.length;
  // Adds three standard deviations of the number of sampled scores among the k largest.
  const auto rank = static_cast<int32_t>(expected + 3 * __builtin_sqrt(expected) + 1);
  if (rank >= kTopkSample) return;
  stream.below = topk_cut(sample, kTopkSample, rank, kTopkBottom).below;
  if (stream.below == kTopkBottom) return;
  stream.threshold = topk_value(static_cast<int32_t>(stream.below));
  stream.admits_all = false;
}

inline void topk_select(const TopkRow* row, void* scratch) {
  const auto capacity = static_cast<int32_t>(topk_row_capacity(row->topk));
  auto* scores = static_cast<float*>(scratch);
  auto* indices = reinterpret_cast<int32_t*>(scores + capacity);
  TopkStream stream = {.scores = scores, .indices = indices, .capacity = capacity, .k = row->topk};
  const TopkStream empty = stream;
  if (row->length > capacity && row->length >= 4 * kTopkSample) topk_guess_threshold(stream, *row);
  const bool guessed = !stream.admits_all;
  topk_push(stream, row->scores, row->length, 0);
  if (guessed && stream.count < stream.k) {  // misled
    stream = empty;
    topk_push(stream, row->scores, row->length, 0);
  }
  topk_finish(stream, row->sorted, row->out, indices + capacity);
}

inline float topk_largest(const float* scores, int64_t count) {
  const Vector none = splat(-__builtin_inff());
  Vector largest[4] = {none, none, none, none};
  int64_t i = 0;
  for (; i + kTopkStep <= count; i += kTopkStep) {
    for (int j = 0; j < 4; ++j)
      largest[j] = max(without_nan(load(scores + i + j * kLanes)), largest[j]);
  }
  float result = reduce_max(max(max(largest[0], largest[1]), max(largest[2], largest[3])));
  for (; i < count; ++i) result = scores[i] > result ? scores[i] : result;
  return result;
}

inline void topk_block_maxima(
    const float* scores, int64_t length, int64_t block_size, float* maxima
) {
  for (int64_t begin = 0; begin < length; begin += block_size) {
    const int64_t left = length - begin;
    *maxima++ = topk_largest(scores + begin, left < block_size ? left : block_size);
  }
}

}  // namespace
}  // namespace cpattn::kernels
