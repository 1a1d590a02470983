// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>

#include "cpattn/base/index_table.h"
#include "cpattn/base/tensor_view.h"

namespace cpattn {

/// Blocks of keys that queries attend to, as MiniMax-M3 selects them. The score of a block is the
/// largest score of the keys in it that the query may see; the first and the last blocks that it
/// may see have infinity instead. A block without a score above -infinity is never selected, NaN
/// counts as -infinity, and of equal blocks the earlier one is selected.
///
/// Under decode context parallelism block b is on rank b mod dcp_size, which has the keys of its
/// blocks one after the other.
struct BlockSelection {
  const char* function;
  TensorView score;                  // float32 [T, num_keys], keys that the rank has
  std::span<const int64_t> lengths;  // [T] >= 0: keys of all ranks that the query may see
  int64_t topk = 0;                  // 1 .. kMaxTopk
  int64_t block_size = 0;            // keys, 1 .. 2^31 - 1
  int64_t init_blocks = 0;           // >= 0, and at most topk together with local_blocks
  int64_t local_blocks = 0;          // >= 0
  int64_t dcp_rank = 0, dcp_size = 1;
  TensorView blocks;        // int32 [T, topk]
  TensorView block_scores;  // float32 [T, topk]
};

/// Writes the selected blocks of each query among those of the rank, ascending, and their scores;
/// -1 and -infinity behind the last. Throws std::invalid_argument, before anything is written, for
/// what does not fit.
void select_blocks(const BlockSelection& given);

/// Selects among blocks that were selected of parts, such as those of ranks: of all parts together
/// if each had `topk`. A block that is named twice counts once, with the larger score.
struct BlockMerge {
  const char* function;
  IndexTable blocks;        // [T, n]; below 0 is none
  TensorView block_scores;  // float32 [T, n]
  int64_t topk = 0;         // 1 .. kMaxTopk
  TensorView out_blocks;    // int32 [T, topk]
  TensorView out_scores;    // float32 [T, topk]
};

/// Writes what select_blocks() would of all keys, and throws as it does.
void merge_blocks(const BlockMerge& given);

}  // namespace cpattn
