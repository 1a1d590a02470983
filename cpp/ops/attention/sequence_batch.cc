// SPDX-License-Identifier: Apache-2.0
#include "cpattn/attention/sequence_batch.h"

#include "cpattn/base/check.h"
#include "ops/attention/key_visibility.h"

namespace cpattn {
namespace {

/// Checks the lengths of sequences against each other, and their sum; returns the latter.
int64_t checked_rows(
    const char* function, const SequenceBatch& batch, const std::vector<AttentionSegment>& segments
) {
  if (const auto& causal = batch.visibility.causal_of_each) {
    check(
        causal->size() == segments.size(), function, ": causal must be a bool or ", segments.size(),
        " bools, one for each sequence, got ", causal->size()
    );
  }
  const bool may_be_short = batch.allow_short_kv || batch.first_positions;
  int64_t num_rows = 0;
  for (std::size_t i = 0; i < segments.size(); ++i) {
    const AttentionSegment& segment = segments[i];
    num_rows += segment.q_len;
    check(
        !batch.visibility.is_causal(static_cast<int64_t>(i)) || may_be_short ||
            segment.q_len <= segment.kv_len,
        function, ": ", batch.csr ? "kv_indptr and last_page_len" : "kv_lens",
        " must count the new tokens too, so be at least q_lens, under causal; got kv_len ",
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
  check(
      batch.block_tables.has_value() != batch.csr.has_value(), function,
      ": give either block_tables with kv_lens, or kv_indptr, kv_indices and last_page_len"
  );
  AttentionBatch planned{
      .shape = batch.shape, .page_size = batch.page_size, .num_pages = batch.num_pages
  };
  std::vector<int64_t> kv_lens = batch.kv_lens;
  if (batch.csr) {
    planned.pages = page_table_from_csr(
        function, batch.csr->kv_indptr, batch.csr->kv_indices, batch.csr->last_page_len,
        batch.page_size, batch.num_pages, kv_lens
    );
    check(
        kv_lens.size() == batch.q_lens.size(), function,
        ": q_lens must have one entry per sequence of kv_indptr (", kv_lens.size(), "), got ",
        batch.q_lens.size()
    );
  }
  planned.segments = sequence_segments(function, batch.q_lens, kv_lens);
  planned.num_rows = checked_rows(function, batch, planned.segments);
  if (batch.first_positions) {
    set_first_positions(function, *batch.first_positions, planned.segments);
  }
  if (batch.block_tables) {
    planned.pages = page_table_from_blocks(
        function, *batch.block_tables, kv_lens, batch.page_size, batch.num_pages
    );
  }
  planned.batch_invariant = batch.batch_invariant;
  planned.precise = batch.precise;
  std::vector<SequenceLens> sequences;
  sequences.reserve(planned.segments.size());
  for (const AttentionSegment& segment : planned.segments) {
    sequences.push_back({segment.q_len, segment.kv_len});
  }
  set_visibility(function, batch.visibility, sequences, planned);
  return plan_attention(function, std::move(planned), num_threads);
}

}  // namespace cpattn
