// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <stdint.h>

namespace cpattn::kernels {

/// One row of scores of which the `topk` largest are wanted.
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
  /// Writes the largest of each `block_size` scores, the last block may be shorter, to `maxima`.
  /// NaN counts as -inf.
  void (*block_maxima)(const float* scores, int64_t length, int64_t block_size, float* maxima);
};

}  // namespace cpattn::kernels
