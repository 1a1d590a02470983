// SPDX-License-Identifier: Apache-2.0
#include "cpattn/sparse/cp_indexer.h"

#include "cpattn/attention/attention_plan.h"
#include "cpattn/base/check.h"
#include "ops/context_parallel/sequence_keys.h"
#include "ops/sparse/index_keys.h"

namespace cpattn {
namespace {

/// Checks that the prefix is counted exactly once: by the metadata or by prefix_lens.
void check_prefix_lens(
    const CheckFor& require,
    const ContextParallelMetadata& metadata,
    const std::optional<std::vector<int64_t>>& prefix_lens
) {
  if (metadata.kv_len_convention == KvLenConvention::baked) {
    require(
        !prefix_lens,
        "prefix_lens must not be given with metadata of kv_len_convention 'baked', whose kv "
        "lengths count the prefix already"
    );
    return;
  }
  require(
      !prefix_lens || static_cast<int32_t>(prefix_lens->size()) == metadata.bs,
      "prefix_lens must have one entry per sequence (", metadata.bs, "), got ",
      prefix_lens ? prefix_lens->size() : 0
  );
  for (int32_t s = 0; s < metadata.bs; ++s) {
    const int64_t known = metadata.prefix_lens[s];
    require(
        prefix_lens || known == 0,
        "prefix_lens must be given with metadata of kv_len_convention 'bare' and a cached prefix, "
        "got prefix ",
        known, " of sequence ", s
    );
    require(
        !prefix_lens || (*prefix_lens)[s] == known,
        "prefix_lens must be those of the seq_lens that metadata was built from, got ",
        prefix_lens ? (*prefix_lens)[s] : 0, " for sequence ", s, ", whose prefix is ", known
    );
  }
}

/// Returns one row per local token: its sequence, and the keys up to its own.
std::vector<IndexerRow> local_rows(const ContextParallelMetadata& metadata) {
  const std::vector<int32_t> requests = query_request_indices(metadata);
  const std::vector<int32_t> cache_lengths = query_cache_lengths(metadata);
  std::vector<IndexerRow> rows(requests.size());
  for (std::size_t i = 0; i < rows.size(); ++i) {
    rows[i] = {.query = static_cast<int64_t>(i), .table_row = requests[i], .end = cache_lengths[i]};
  }
  return rows;
}

}  // namespace

void cp_indexer_topk(const ContextParallelMetadata& metadata, const CpIndexerArguments& arguments) {
  const char* function = arguments.function;
  const CheckFor require{function};
  check_tensor(function, arguments.q_name, arguments.q, 3);
  require(
      arguments.q.shape[0] >= metadata.num_local_rows(), arguments.q_name,
      " must have at least the ", metadata.num_local_rows(), " rows that the metadata gives rank ",
      metadata.cp_rank, ", got ", arguments.q.shape[0]
  );
  check_prefix_lens(require, metadata, arguments.prefix_lens);
  const IndexKeys keys = view_index_keys(
      function, arguments.index_k_cache, arguments.k_scale, arguments.page_size,
      arguments.q.shape[2], arguments.k_scale_name
  );
  const std::vector<IndexerRow> rows = local_rows(metadata);
  const std::vector<int64_t> kv_lens =
      keys_per_sequence(rows, metadata.bs, [](const IndexerRow& row) { return row.end; });
  const PageTable pages = page_table_from_blocks(
      function, arguments.block_tables, kv_lens, keys.page_size, keys.num_pages
  );
  const IndexerArguments indexer{
      .function = function,
      .q = arguments.q,
      .weights = arguments.weights,
      .keys = keys,
      .pages = pages,
      .rows = rows,
      .num_threads = arguments.num_threads,
      .q_name = arguments.q_name,
  };
  indexer_topk(
      indexer, {.topk = arguments.topk, .sorted = arguments.sorted, .indices = arguments.indices}
  );
}

}  // namespace cpattn
