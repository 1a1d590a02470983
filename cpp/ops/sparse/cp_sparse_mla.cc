// SPDX-License-Identifier: Apache-2.0
#include "cpattn/sparse/cp_sparse_mla.h"

#include <algorithm>
#include <vector>

#include "cpattn/base/check.h"
#include "cpattn/sparse/topk.h"
#include "ops/sparse/slot_rows.h"

namespace cpattn {
namespace {

constexpr char kFunction[] = "cp_sparse_mla";
constexpr CheckFor require{kFunction};

/// Indices of all rows in memory of the call.
struct Selection {
  Selection(int64_t rows, int64_t topk) : indices(rows * topk) {
    view = {
        .data = indices.data(),
        .dtype = DType::int32,
        .rank = 2,
        .writable = true,
        .shape = {rows, topk},
        .strides = {topk, 1}
    };
  }

  std::vector<int32_t> indices;
  TensorView view;
};

/// Turns positions within sequences into slots; returns the largest.
int64_t replace_by_slots(
    const ContextParallelMetadata& metadata, const CpIndexerArguments& indexer, Selection& selection
) {
  const std::vector<int32_t> requests = query_request_indices(metadata);
  const std::vector<int64_t> table_rows(requests.begin(), requests.end());
  const SlotRows slots(kFunction, {indexer.block_tables, indexer.page_size}, table_rows);
  int64_t largest = -1;
  for (std::size_t row = 0; row < table_rows.size(); ++row) {
    int32_t* chosen = selection.indices.data() + static_cast<int64_t>(row) * indexer.topk;
    slots.replace(static_cast<int64_t>(row), chosen, indexer.topk);
    largest = std::max<int64_t>(largest, *std::max_element(chosen, chosen + indexer.topk));
  }
  return largest;
}

}  // namespace

void cp_sparse_mla(const ContextParallelMetadata& metadata, const CpSparseMlaArguments& arguments) {
  CpIndexerArguments indexer = arguments.indexer;
  SparseMlaArguments attention = arguments.attention;
  indexer.function = attention.function = kFunction;
  indexer.q_name = "index_q";
  indexer.k_scale_name = "index_k_scale";
  check_tensor(kFunction, "index_q", indexer.q, 3);
  check_tensor(kFunction, "q", attention.q, 3);
  const int64_t rows = indexer.q.shape[0];
  require(
      attention.q.shape[0] == rows, "q must have the ", rows, " rows of index_q, got ",
      attention.q.shape[0]
  );
  constexpr int64_t kMostIndices = int64_t{1} << 40;  // far above any memory
  const int64_t most = std::min(kMaxIndexerTopk, kMostIndices / std::max<int64_t>(rows, 1));
  require(
      indexer.topk >= 1 && indexer.topk <= most, "topk must be 1 to ", most, " for ", rows,
      " rows, got ", indexer.topk
  );
  Selection selection(rows, indexer.topk);
  indexer.indices = selection.view;
  cp_indexer_topk(metadata, indexer);
  const int64_t largest = replace_by_slots(metadata, indexer, selection);
  const TensorView& kv = attention.kv;
  const int64_t slots = kv.rank == 4 ? kv.shape[0] * kv.shape[1] : kv.rank > 0 ? kv.shape[0] : 0;
  require(
      largest < slots, "kv must have the slots of block_tables, got ", slots, " for slot ", largest
  );
  attention.indices = selection.view;
  flash_mla_sparse_fwd(attention);
}

}  // namespace cpattn
