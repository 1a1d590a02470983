// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "cpattn/base/index_table.h"
#include "cpattn/base/tensor_view.h"

namespace cpattn {

/// The arguments of npu_lightning_indexer under the operator's own names. B
/// is the batch, S the tokens of a sequence (S1 of query, S2 of key), T all tokens of the
/// batch in a row, N heads, D the dimension of a head.
struct LightningIndexerArguments {
  TensorView query;    // BSND [B, S1, N, D] or TND [T1, N, D]; bfloat16 or float32
  TensorView key;      // BSND [B, S2, 1, D], TND [T2, 1, D] or PA_BSND [blocks, block_size, 1, D]
  TensorView weights;  // the shape of query without D; of its dtype or float32
  std::optional<std::vector<int64_t>> actual_seq_lengths_query;  // [B]; TND: running sums
  std::optional<std::vector<int64_t>> actual_seq_lengths_key;    // [B]; TND: running sums
  std::optional<IndexTable> block_table;                         // PA_BSND: [B, blocks]
  std::string layout_query = "BSND";
  std::string layout_key = "BSND";
  int64_t sparse_count = 2048;
  int64_t sparse_mode = 3;
  int64_t pre_tokens = std::numeric_limits<int64_t>::max();
  int64_t next_tokens = std::numeric_limits<int64_t>::max();
  TensorView indices;                // int32, contiguous: the shape of query with [1, sparse_count]
                                     // for [N, D]
  std::optional<TensorView> values;  // float32, contiguous, the shape of indices: their scores
};

/// Selects the sparse_count keys with the largest sum_n weights[n] relu(query[n] . key) for each
/// query and writes their positions within its sequence: query i of S1 chooses among all S2 keys in
/// mode 0, and among keys [0, i + S2 - S1] in mode 3, S1 and S2 being the lengths of its sequence.
/// Keys stand in descending order of score, ties by ascending index, or all in ascending order if
/// all keys are chosen. After them, and in rows past the length of their sequence, indices are -1
/// and values -inf.
///
/// Throws std::invalid_argument for whatever the operator's documentation rules out: layouts,
/// mandatory arguments, lengths, modes, block ids. Limits of the chip (head counts, D, block sizes,
/// sparse_count) are not enforced.
void npu_lightning_indexer(const LightningIndexerArguments& arguments);

}  // namespace cpattn
