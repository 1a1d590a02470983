// SPDX-License-Identifier: Apache-2.0
#include "ops/npu/fia_sequences.h"

#include <algorithm>
#include <optional>
#include <tuple>
#include <utility>

#include "cpattn/base/page_size.h"
#include "cpattn/base/prefix_sums.h"

namespace cpattn::fia {
namespace {

using Lengths = std::optional<std::vector<int64_t>>;

/// Lengths of `batch` sequences: one for all, or the first `batch` of a longer list.
std::vector<int64_t> plain_lengths(
    const char* name, const Lengths& given, int64_t batch, int64_t limit
) {
  if (!given) return std::vector<int64_t>(batch, limit);
  const auto size = static_cast<int64_t>(given->size());
  require(
      size == 1 || size >= batch, name, " must have 1 or at least B = ", batch, " entries, got ",
      size
  );
  std::vector<int64_t> lengths(batch);
  for (int64_t b = 0; b < batch; ++b) {
    lengths[b] = (*given)[size == 1 ? 0 : b];
    require(
        lengths[b] >= 0 && lengths[b] <= limit, name, " must be in [0, ", limit, "], got ",
        lengths[b], " at index ", size == 1 ? 0 : b
    );
  }
  return lengths;
}

/// Begins and lengths of packed sequences from the running sums of their lengths.
std::pair<std::vector<int64_t>, std::vector<int64_t>> packed_lengths(
    const char* name, const std::vector<int64_t>& sums, int64_t total
) {
  check_prefix_sums(
      kFunction, name, sums,
      {.reaches_total = true, .total = total, .total_name = "the number of packed rows"}
  );
  std::vector<int64_t> begins, lengths;
  int64_t end = 0;
  for (const int64_t sum : sums) {
    begins.push_back(end);
    lengths.push_back(sum - end);
    end = sum;
  }
  return {std::move(begins), std::move(lengths)};
}

void check_given(const FiaArguments& arguments, const Layout& layout) {
  require(
      arguments.actual_seq_lengths || !layout.packed(), "actual_seq_lengths is mandatory for ",
      arguments.input_layout
  );
  require(
      arguments.actual_seq_lengths_kv || (!layout.packed() && !arguments.block_table),
      "actual_seq_lengths_kv is mandatory with block_table and for ",
      layout.packed() ? arguments.input_layout : "packed layouts"
  );
  require(
      !layout.packed() ||
          arguments.actual_seq_lengths_kv->size() == arguments.actual_seq_lengths->size(),
      "actual_seq_lengths_kv must have as many entries as actual_seq_lengths (",
      arguments.actual_seq_lengths ? arguments.actual_seq_lengths->size() : 0, "), got ",
      arguments.actual_seq_lengths_kv ? arguments.actual_seq_lengths_kv->size() : 0
  );
}

void read_query_lengths(
    const FiaArguments& arguments,
    const Layout& layout,
    const TensorView& query,
    Sequences& sequences
) {
  const Lengths& given = arguments.actual_seq_lengths;
  const int64_t batch = query.shape[0], rows = query.shape[1];
  if (layout.packed()) {
    std::tie(sequences.q_begins, sequences.q_lens) =
        packed_lengths("actual_seq_lengths", *given, rows);
    return;
  }
  sequences.q_lens = plain_lengths("actual_seq_lengths", given, batch, rows);
  for (int64_t b = 0; b < batch; ++b) sequences.q_begins.push_back(b * rows);
}

void read_key_lengths(
    const FiaArguments& arguments, const Layout& layout, const PagedCache& key, Sequences& sequences
) {
  constexpr char kName[] = "actual_seq_lengths_kv";
  const Lengths& given = arguments.actual_seq_lengths_kv;
  const auto batch = static_cast<int64_t>(sequences.q_lens.size());
  if (arguments.block_table) {
    const IndexTable& table = *arguments.block_table;
    require(
        table.rows == batch, "block_table must have one row per sequence (", batch, "), got ",
        table.rows
    );
    sequences.kv_lens =
        plain_lengths(kName, given, batch, tokens_per_row(table.columns, arguments.block_size));
    sequences.max_kv_len = *std::max_element(sequences.kv_lens.begin(), sequences.kv_lens.end());
  } else if (layout.packed()) {
    std::tie(sequences.kv_begins, sequences.kv_lens) = packed_lengths(kName, *given, key.num_pages);
    sequences.max_kv_len = key.num_pages;
  } else {
    require(
        key.num_pages == batch, "key and value must have the batch size of query, ", batch,
        ", got ", key.num_pages
    );
    sequences.max_kv_len = arguments.key.num_elements() == 0 ? 0 : key.page_size;
    sequences.kv_lens = plain_lengths(kName, given, batch, sequences.max_kv_len);
  }
}

}  // namespace

Sequences read_sequences(
    const FiaArguments& arguments,
    const Layout& layout,
    const TensorView& query,
    const PagedCache& key
) {
  check_given(arguments, layout);
  Sequences sequences;
  read_query_lengths(arguments, layout, query, sequences);
  read_key_lengths(arguments, layout, key, sequences);
  return sequences;
}

PageTable read_pages(
    const FiaArguments& arguments,
    const Layout& layout,
    const Sequences& sequences,
    const PagedCache& key
) {
  if (arguments.block_table) {
    return page_table_from_blocks(
        kFunction, *arguments.block_table, sequences.kv_lens, key.page_size, key.num_pages
    );
  }
  PageTable pages;
  for (std::size_t b = 0; b < sequences.kv_lens.size(); ++b) {
    if (sequences.kv_lens[b] > 0) {
      const int64_t page = layout.packed() ? sequences.kv_begins[b] : static_cast<int64_t>(b);
      pages.page_ids.push_back(
          narrow_to_int32(page, "npu_fused_infer_attention_score: row of key")
      );
    }
    pages.indptr.push_back(static_cast<int64_t>(pages.page_ids.size()));
  }
  return pages;
}

}  // namespace cpattn::fia
