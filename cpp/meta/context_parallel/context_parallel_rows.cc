// SPDX-License-Identifier: Apache-2.0
#include "cpattn/base/check.h"
#include "cpattn/context_parallel/context_parallel.h"

namespace cpattn {
namespace {

/// Calls visit(sequence, position, global) for every local row in order: its
/// position among the new tokens of the sequence, and in the whole batch.
template <class Visit>
void for_each_local_row(const ContextParallelMetadata& metadata, Visit visit) {
  if (metadata.strategy == CpStrategy::interleave) {
    int64_t global = metadata.cp_rank;
    int64_t begin = 0;
    for (int32_t s = 0; s < metadata.bs; ++s) {
      const int64_t end = begin + metadata.extend_lens[s];
      for (; global < end; global += metadata.cp_size) visit(s, global - begin, global);
      begin = end;
    }
    return;
  }
  const bool baked = metadata.kv_len_convention == KvLenConvention::baked;
  const auto visit_blocks = [&](auto q_lens, auto kv_lens) {
    for (int32_t s = 0, begin = 0; s < static_cast<int32_t>(q_lens.size()); ++s) {
      const int32_t end = kv_lens[s] - (baked ? metadata.prefix_lens[s] : 0);
      for (int32_t p = end - q_lens[s]; p < end; ++p) visit(s, p, begin + p);
      begin += metadata.extend_lens[s];
    }
  };
  visit_blocks(metadata.actual_seq_q_prev, metadata.kv_len_prev);
  visit_blocks(metadata.actual_seq_q_next, metadata.kv_len_next);
}

template <class Value>
std::vector<int32_t> map_local_rows(const ContextParallelMetadata& metadata, Value value) {
  std::vector<int32_t> out(metadata.num_local_rows());
  int32_t* next = out.data();
  for_each_local_row(metadata, [&](int32_t s, int64_t position, int64_t global) {
    *next++ = static_cast<int32_t>(value(s, position, global));
  });
  return out;
}

}  // namespace

std::vector<int32_t> local_q_indices(const ContextParallelMetadata& metadata) {
  return map_local_rows(metadata, [](int32_t, int64_t, int64_t global) { return global; });
}

std::vector<int32_t> query_request_indices(const ContextParallelMetadata& metadata) {
  return map_local_rows(metadata, [](int32_t s, int64_t, int64_t) { return s; });
}

std::vector<int32_t> query_cache_lengths(const ContextParallelMetadata& metadata) {
  return map_local_rows(metadata, [&](int32_t s, int64_t position, int64_t) {
    return metadata.prefix_lens[s] + position + 1;
  });
}

std::vector<int32_t> rows_per_request(const ContextParallelMetadata& metadata) {
  check(
      metadata.strategy == CpStrategy::interleave,
      "rows_per_request: strategy must be 'interleave', got '", cp_strategy_name(metadata.strategy),
      "'"
  );
  // The rank owns ceil((end - rank) / size) of the tokens [0, end).
  const int64_t size = metadata.cp_size;
  const auto owned = [&](int64_t end) { return (end + size - 1 - metadata.cp_rank) / size; };
  std::vector<int32_t> rows(metadata.bs);
  int64_t begin = 0;
  for (int32_t s = 0; s < metadata.bs; ++s) {
    const int64_t end = begin + metadata.extend_lens[s];
    rows[s] = static_cast<int32_t>(owned(end) - owned(begin));
    begin = end;
  }
  return rows;
}

}  // namespace cpattn
