// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "cpattn/base/index_table.h"
#include "cpattn/base/tensor_view.h"
#include "cpattn/sparse/topk_transform_method.h"

namespace cpattn {

/// The slots of the tokens of sequences: token p of row r of the table is in slot
///   table[r, p / page_size] * page_size + p % page_size
/// Entries that are read must be >= 0, and slots must fit int32.
struct SlotTable {
  IndexTable pages;
  int64_t page_size = 1;
};

/// Row i selects among the columns [row_starts[i], row_starts[i] + lengths[i]) of score, its
/// candidates. Indices are relative to row_starts[i].
///
/// All functions of this header throw std::invalid_argument for arguments that do not fit, before
/// anything is written. Only a wrong entry of a page table, or a wrong index into it, may be found
/// after rows of the result have been written.
struct TopkArguments {
  using Ints = std::span<const int64_t>;

  const char* function;
  TensorView score;                // float32 [B, L]
  Ints lengths;                    // [B]; below 0 counts as 0
  std::optional<Ints> row_starts;  // [B] >= 0; default 0
  int64_t topk = 0;                // 1 .. kMaxTopk
  bool sorted = true;
  const char* score_name = "score";  // in errors
};

constexpr int64_t kMaxTopk = int64_t{1} << 28;

/// Writes indices [B, topk] int32: the topk candidates with the largest scores, ties to the
/// smaller index, NaN as -inf and +0 as -0. Their order is by score, descending, then by index if
/// `sorted`, else by index. A row with at most topk candidates gets all of them, ascending,
/// whatever their scores are, then -1.
void fast_topk(const TopkArguments& arguments, const TensorView& indices);

/// The slots of the sequence of each row. The sequences are rows batch_idx_list of the
/// table (default: all of them). Rows cu_seqlens_q[q] up to cu_seqlens_q[q + 1] belong to sequence
/// q. cu_seqlens_q rises from 0 to B; without it every row has a sequence of its own.
struct TopkSlots {
  SlotTable table;
  std::optional<std::span<const int64_t>> cu_seqlens_q;    // [num_sequences + 1]
  std::optional<std::span<const int64_t>> batch_idx_list;  // [num_sequences]
};

/// Writes what fast_topk selects as slots, -1 as -1. A candidate beyond the width of the table is
/// an error, selected or not.
void fast_topk_transform_fused(
    const TopkArguments& arguments, const TopkSlots& slots, const TensorView& out
);

/// Writes what fast_topk selects plus offsets[i] (offsets [B]), -1 as -1: rows of the concatenated
/// sequences.
void fast_topk_transform_ragged_fused(
    const TopkArguments& arguments, std::span<const int64_t> offsets, const TensorView& out
);

/// Calls one of the three functions above, fast_topk if there is no method. Arguments that the
/// method does not need are ignored. RAGGED without offsets throws std::runtime_error with the
/// engines' own message.
void topk_transform(
    const TopkArguments& arguments,
    std::optional<TopkTransformMethod> method,
    const std::optional<TopkSlots>& slots,
    const std::optional<std::span<const int64_t>>& offsets,
    const TensorView& out
);

/// Writes out [rows, topk] int32: the slots of indices [rows, topk] that are selected already. Row
/// i reads row i of the table. An index < 0 becomes -1, one beyond the table is an error.
void transform_index_page_table_decode(
    const SlotTable& table, const IndexTable& indices, const TensorView& out
);

/// Writes slots if extend_lens[s] rows of each sequence s read row s of the table. The lengths
/// add up to the number of rows.
void transform_index_page_table_prefill(
    const SlotTable& table,
    const IndexTable& indices,
    std::span<const int64_t> extend_lens,
    const TensorView& out
);

/// Writes out [rows, topk] int32 for short sequences: the slots of the first min(lengths[i], topk)
/// tokens in table row i, then -1. Rows beyond the table are all -1.
void page_table_to_topk(
    const SlotTable& table, std::span<const int64_t> lengths, const TensorView& out
);

}  // namespace cpattn
