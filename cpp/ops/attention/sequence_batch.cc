// SPDX-License-Identifier: Apache-2.0
#include "cpattn/attention/sequence_batch.h"

#include <algorithm>

#include "cpattn/base/check.h"

namespace cpattn {
namespace {

MaskBits pack_custom_mask(
    const char* function, const TensorView& mask, const std::vector<AttentionSegment>& segments
) {
  check(mask.dtype == DType::bool8, function, ": custom_mask must be bool, got ", mask.dtype);
  check(mask.is_contiguous(), function, ": custom_mask must be contiguous");
  std::vector<int64_t> starts;
  std::vector<int64_t> row_strides;
  const int64_t given = mask.num_elements();
  int64_t elements = 0;
  for (const AttentionSegment& segment : segments) {
    starts.push_back(elements);
    row_strides.push_back(segment.kv_len);
    elements += segment.q_len * segment.kv_len;
    if (elements > given) break;  // before the sum could overflow
  }
  const bool all_counted = starts.size() == segments.size();
  check(
      elements == given, function, ": custom_mask must have sum(q_len * kv_len) = ", elements,
      all_counted ? "" : " or more", " elements, got ", given
  );
  return pack_mask(segments, mask.as<uint8_t>(), starts, row_strides, /*inverted=*/false);
}

/// Checks the arguments that exclude or need each other.
void check_options(const char* function, const SequenceBatch& batch) {
  check(
      batch.block_tables.has_value() != batch.csr.has_value(), function,
      ": give either block_tables with kv_lens, or kv_indptr, kv_indices and last_page_len"
  );
  check(
      !batch.window || *batch.window >= 0, function,
      ": window must be >= 0 (0: a token sees itself), got ", batch.window.value_or(0)
  );
  check(!batch.window || batch.causal, function, ": window needs causal=True");
}

/// Checks the lengths of sequences against each other, and their sum; returns the latter.
int64_t checked_rows(
    const char* function, const SequenceBatch& batch, const std::vector<AttentionSegment>& segments
) {
  int64_t num_rows = 0;
  for (std::size_t i = 0; i < segments.size(); ++i) {
    const AttentionSegment& segment = segments[i];
    num_rows += segment.q_len;
    check(
        !batch.causal || batch.allow_short_kv || segment.q_len <= segment.kv_len, function,
        ": kv_lens must count the new tokens too, so be at least q_lens, under causal; got kv_len ",
        segment.kv_len, " for q_len ", segment.q_len, " at index ", i,
        "; allow_short_kv=True lets the first queries see nothing"
    );
  }
  check(
      !batch.num_rows || *batch.num_rows == num_rows, function,
      ": q must have a row for each new token, sum(q_lens) = ", num_rows, ", got ",
      batch.num_rows.value_or(0)
  );
  return num_rows;
}

}  // namespace

AttentionPlan plan_sequences(const char* function, const SequenceBatch& batch, int num_threads) {
  check_options(function, batch);
  AttentionBatch planned{
      .shape = batch.shape, .page_size = batch.page_size, .num_pages = batch.num_pages
  };
  std::vector<int64_t> kv_lens = batch.kv_lens;
  if (batch.csr) {
    planned.pages = page_table_from_csr(
        function, batch.csr->kv_indptr, batch.csr->kv_indices, batch.csr->last_page_len,
        batch.page_size, batch.num_pages, kv_lens
    );
  }
  planned.segments = sequence_segments(function, batch.q_lens, kv_lens);
  planned.num_rows = checked_rows(function, batch, planned.segments);
  if (batch.block_tables) {
    planned.pages = page_table_from_blocks(
        function, *batch.block_tables, kv_lens, batch.page_size, batch.num_pages
    );
  }
  planned.left = std::min(batch.window.value_or(kUnboundedKeys), kUnboundedKeys);
  planned.batch_invariant = batch.batch_invariant;
  planned.right = batch.causal ? 0 : kUnboundedKeys;
  if (batch.custom_mask) {
    planned.mask = pack_custom_mask(function, *batch.custom_mask, planned.segments);
  }
  return plan_attention(function, std::move(planned), num_threads);
}

}  // namespace cpattn
