// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <stdint.h>

namespace cpattn::kernels {

/// One row of scores, whose `topk` largest are selected.
struct TopkRow {
  const float* scores;  // [length]
  int32_t length;
  int32_t topk;
  bool sorted;   // by score, descending, ties by index; else by index
  int32_t* out;  // [topk]: indices into scores, -1 in the tail if length < topk
};

struct TopkKernel {
  /// Bytes of scratch, aligned to 64, that a row needs.
  int64_t (*scratch_bytes)(int32_t topk);
  void (*select)(const TopkRow* row, void* scratch);
  /// Writes the largest score of each block of `block_size` (the last may be shorter) to `maxima`.
  /// NaN counts as -inf.
  void (*block_maxima)(const float* scores, int64_t length, int64_t block_size, float* maxima);
};

}  // namespace cpattn::kernels
