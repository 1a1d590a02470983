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

/// The arguments of npu_sparse_flash_attention under the operator's own names. B
/// is the batch, S the tokens of a sequence (S1 of query, S2 of key), T all tokens of the
/// batch in a row, N heads, D the dimension of a head.
struct SparseFlashArguments {
  TensorView query;           // BSND [B, S1, N, D] or TND [T1, N, D]
  TensorView key, value;      // BSND [B, S2, 1, D], TND [T2, 1, D] or PA_BSND [blocks,
                              // block_size, 1, D], of the dtype of query; value: another D
  TensorView sparse_indices;  // int32 or int64, the shape of query with [1, K] for [N, D]
  double scale_value = 1;
  std::optional<IndexTable> block_table;                         // PA_BSND: [B, blocks]
  std::optional<std::vector<int64_t>> actual_seq_lengths_query;  // [B]; TND: running sums
  std::optional<std::vector<int64_t>> actual_seq_lengths_kv;     // [B]; TND: running sums
  std::optional<TensorView> query_rope, key_rope;                // more dimensions: the shapes of
                                                                 // query and key with another D
  int64_t sparse_block_size = 1;
  std::string layout_query = "BSND";
  std::string layout_kv = "BSND";
  int64_t sparse_mode = 3;
  int64_t pre_tokens = std::numeric_limits<int64_t>::max();
  int64_t next_tokens = std::numeric_limits<int64_t>::max();
  int64_t attention_mode = 0;
  TensorView out;  // the shape of query with the D of value
  /// float32 and contiguous, [B, 1, S1, N] or [1, T1, N]; both or none.
  std::optional<TensorView> softmax_max, softmax_sum;
};

/// Attention of each query over the blocks of keys that it names: position p of its
/// sequence is in block p / sparse_block_size. The first entry below 0 ends a row of
/// sparse_indices. Query i of S1 sees all S2 keys of its blocks in mode 0, and those
/// up to i + S2 - S1 in mode 3, S1 and S2 being the lengths of its sequence.
///
/// attention_mode 2 is absorbed MLA, with query_rope and key_rope; mode 0 has neither.
/// softmax_max is the largest scaled score, softmax_sum the sum of exp(score -
/// softmax_max). They are -inf and 0, and out is zeros, for a query that sees no key or lies past
/// the length of its sequence.
///
/// Throws std::invalid_argument for whatever the operator's documentation rules out. Limits of the
/// chip (head counts, D, block sizes) are not enforced.
void npu_sparse_flash_attention(const SparseFlashArguments& arguments);

}  // namespace cpattn
