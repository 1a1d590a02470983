// SPDX-License-Identifier: Apache-2.0
#include "cpattn/context_parallel/cp_attention.h"

namespace cpattn {
namespace {

using Ints = ContextParallelMetadata::Ints;

/// One segment per sequence for a family of blocks.
void append_blocks(
    Ints q_lens, Ints kv_lens, int64_t q_begin, std::vector<AttentionSegment>& segments
) {
  for (std::size_t s = 0; s < q_lens.size(); ++s) {
    segments.push_back({
        .q_begin = q_begin,
        .q_len = q_lens[s],
        .kv_len = kv_lens[s],
        .first_position = int64_t{kv_lens[s]} - q_lens[s],
        .table_row = static_cast<int64_t>(s),
    });
    q_begin += q_lens[s];
  }
}

/// One segment per sequence that has local rows: every cp_size-th token.
std::vector<AttentionSegment> interleaved_segments(const ContextParallelMetadata& metadata) {
  const std::vector<int32_t> requests = query_request_indices(metadata);
  const std::vector<int32_t> cache_lengths = query_cache_lengths(metadata);
  std::vector<AttentionSegment> segments;
  for (std::size_t row = 0; row < requests.size(); ++row) {
    if (row == 0 || requests[row] != requests[row - 1]) {
      segments.push_back({
          .q_begin = static_cast<int64_t>(row),
          .first_position = cache_lengths[row] - 1,
          .position_step = metadata.cp_size,
          .table_row = requests[row],
      });
    }
    ++segments.back().q_len;
    segments.back().kv_len = cache_lengths[row];
  }
  return segments;
}

std::vector<AttentionSegment> causal_segments(const ContextParallelMetadata& metadata) {
  if (metadata.strategy == CpStrategy::interleave) return interleaved_segments(metadata);
  std::vector<AttentionSegment> segments;
  append_blocks(metadata.actual_seq_q_prev, metadata.kv_len_prev, 0, segments);
  append_blocks(
      metadata.actual_seq_q_next, metadata.kv_len_next, metadata.total_q_prev_tokens, segments
  );
  return segments;
}

}  // namespace

std::vector<AttentionSegment> cp_segments(const ContextParallelMetadata& metadata, bool causal) {
  std::vector<AttentionSegment> segments = causal_segments(metadata);
  for (AttentionSegment& segment : segments) {
    const int64_t prefix = metadata.prefix_lens[segment.table_row];
    segment.first_token = segment.first_position - prefix;
    if (!causal) segment.kv_len = prefix + metadata.extend_lens[segment.table_row];
  }
  return segments;
}

}  // namespace cpattn
