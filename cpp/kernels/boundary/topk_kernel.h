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
};

}  // namespace cpattn::kernels
