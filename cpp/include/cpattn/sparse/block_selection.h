// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>

#include "cpattn/base/index_table.h"
#include "cpattn/base/tensor_view.h"

namespace cpattn {

/// Blocks of keys that queries attend to, as MiniMax-M3 selects them. The score of a block is the
/// largest score of its keys that the query may see; the first init_blocks and the last
/// local_blocks that the query may see have infinity instead. A block without a score above
/// -infinity is never selected, NaN counts as -infinity, and of equal blocks the earlier one is
/// selected.
///
/// Under decode context parallelism block b is on rank b mod dcp_size, which keeps the keys of its
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

/// Selects among the rank's blocks and writes the blocks of each query in ascending order with
/// their scores, then -1 and -infinity. Throws std::invalid_argument, before anything is written,
/// for arguments that do not fit.
void select_blocks(const BlockSelection& given);

/// Merges selections of parts of the keys, such as those of ranks. The result is the selection over
/// all parts if each part selected `topk` blocks. A block that occurs twice counts once, with the
/// larger score.
struct BlockMerge {
  const char* function;
  IndexTable blocks;        // [T, n]; below 0 is none
  TensorView block_scores;  // float32 [T, n]
  int64_t topk = 0;         // 1 .. kMaxTopk
  TensorView out_blocks;    // int32 [T, topk]
  TensorView out_scores;    // float32 [T, topk]
};

/// Writes what select_blocks() would write for all keys, and throws like it.
void merge_blocks(const BlockMerge& given);

}  // namespace cpattn
