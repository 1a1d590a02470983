// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "cpattn/attention/attention_plan.h"
#include "cpattn/base/tensor_view.h"

namespace cpattn {

/// Keys of the indexer, one head of `dim` numbers: row j of a sequence is row
/// j % page_size of page j / page_size in its row of the page table. Strides are in
/// bytes, so that pages may hold rows and scales one after the other.
struct IndexKeys {
  const void* data = nullptr;
  DType dtype = DType::bfloat16;  // bfloat16, float32, float8_e4m3fn or int8
  int64_t dim = 0;
  int64_t num_pages = 0;
  int64_t page_size = 0;
  int64_t page_bytes = 0;
  int64_t row_bytes = 0;
  const void* scales = nullptr;  // float32, one per row; null: all 1
  int64_t scale_page_bytes = 0;
  int64_t scale_row_bytes = 0;
};

/// One query of the indexer: it scores keys [begin, end) of the sequence in row
/// `table_row` of the page table, and no key if begin >= end.
struct IndexerRow {
  int64_t query = 0;
  int64_t table_row = 0;
  int64_t begin = 0;
  int64_t end = 0;
};

/// Scores of the indexer, in float32:
///   logit[i, j] = scale[j] * sum_h weights[i, h] * relu(q[i, h] . k[j])
/// The bits of a score depend on its query and its key alone. `dim` is a multiple of 16,
/// of 32 for float8_e4m3fn, and at most 256. Throws std::invalid_argument for tensors,
/// rows and strides that do not fit; pages are checked where their table is made.
struct IndexerArguments {
  const char* function;
  TensorView q;        // [T, H, D], of the dtype of the keys
  TensorView weights;  // float32 or bfloat16 [T, H] or [T, H, 1]
  IndexKeys keys;
  const PageTable& pages;
  std::span<const IndexerRow> rows;  // at most one of each query
  int num_threads = 0;               // 0: default_num_threads()
  const char* q_name = "q";          // in errors
};

/// Returns keys k [S, D] as one page, with scales float32 [S] if there are any. Throws
/// std::invalid_argument, which names `function`, for shapes and dtypes that do not fit.
IndexKeys flat_index_keys(
    const char* function, const TensorView& k, const std::optional<TensorView>& scales
);

/// Returns rows in which query i scores keys [ks[i], ke[i]) of the one sequence of flat_index_keys.
/// Throws std::invalid_argument, which names `function`, for lists of other lengths and keys
/// outside [0, num_keys].
std::vector<IndexerRow> flat_indexer_rows(
    const char* function,
    std::span<const int64_t> ks,
    std::span<const int64_t> ke,
    int64_t num_queries,
    int64_t num_keys
);

/// Writes logits [T, L], float32: column j is the score of key j of the row's sequence, or -inf
/// outside [begin, end) and for queries without an IndexerRow.
void indexer_logits(const IndexerArguments& arguments, const TensorView& logits);

constexpr int64_t kMaxIndexerTopk = int64_t{1} << 20;

/// The number of keys that indexer_topk selects, and the tensors that it writes.
struct IndexerTopk {
  int64_t topk = 0;                  // 1 .. kMaxIndexerTopk
  bool sorted = true;                // by score, descending; else by index
  TensorView indices;                // int32 [T, topk], relative to a row's `begin`
  std::optional<TensorView> values;  // float32 [T, topk]: their scores, -inf beside -1
};

/// Selects the topk keys of each query with the largest scores, ties to the smaller index, NaN as
/// -inf. If a query has at most topk keys it gets all of them, in ascending order, then -1. Queries
/// without an IndexerRow get -1 only. Scores are never stored: memory does not grow with the number
/// of keys.
void indexer_topk(const IndexerArguments& arguments, const IndexerTopk& topk);

}  // namespace cpattn
