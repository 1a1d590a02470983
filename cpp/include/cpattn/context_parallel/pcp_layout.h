// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace cpattn {

/// The batch that prefill context parallelism (PCP) divides over P = pcp_size ranks as vLLM 0.32
/// does. Lengths and their sums are >= 0 and fit int32.
struct PcpBatch {
  std::span<const int64_t> extend_lens;                // [bs] new tokens
  std::span<const int64_t> prefix_lens;                // [bs] cached tokens
  std::optional<std::span<const uint8_t>> is_prefill;  // [bs]; default: see build_pcp_layout
  int64_t pcp_size = 1;                                // 1 .. kMaxCpSize
  int64_t dcp_size = 1;                                // 1 .. kMaxCpSize
  bool shard_decode = true;
  std::optional<int64_t> padded_num_tokens;  // rows of each rank; default: those of the longest
};

/// The rows of all ranks: consecutive tokens of a request are a segment. Segments stand in the
/// order of the rows, one rank after the other; those of rank r are
/// [segment_indptr[r], segment_indptr[r + 1]).
struct PcpLayout {
  using Ints = std::vector<int64_t>;

  Ints extend_lens, prefix_lens;    // [bs]
  std::vector<uint8_t> is_prefill;  // [bs]
  std::vector<uint8_t> replicated;  // [bs] whether each rank has all new tokens
  int64_t pcp_size = 1;
  int64_t dcp_size = 1;
  bool shard_decode = true;
  int64_t num_tokens = 0;         // new ones of all requests
  int64_t padded_num_tokens = 0;  // rows of each rank

  Ints segment_indptr;           // [pcp_size + 1]
  Ints request;                  // of each segment
  Ints batch_start, batch_stop;  // its tokens among the new ones of the batch
  Ints rank_start, rank_stop;    // its rows on its rank
  Ints seq_lens;                 // the keys that its last token sees

  int64_t num_rows(int64_t rank) const {
    const int64_t end = segment_indptr[rank + 1];
    return end == segment_indptr[rank] ? 0 : rank_stop[end - 1];
  }
  bool operator==(const PcpLayout&) const = default;
};

/// Divides a batch. A prefill of L tokens is cut into 2 P chunks of ceil(L / (2 P)), of which the
/// last ones may be short or empty, and rank r has chunks r and 2 P - 1 - r. A decode is whole: on
/// one rank in turn with shard_decode, else on all of them. With dcp_size > 1 ranks share out keys,
/// so decodes, and prefills too short to fill 2 P chunks, are on all ranks whatever shard_decode
/// is. On each rank decodes come first, then prefills, both by request.
///
/// Without is_prefill, requests with one new token after cached ones are decodes. Throws
/// std::invalid_argument, which begins with `function`, for a batch that breaks the rules of
/// PcpBatch, and a padded_num_tokens below the rows of a rank.
PcpLayout build_pcp_layout(const PcpBatch& batch, const char* function);

/// The token of each row of a rank in [0, pcp_size), without padding.
std::vector<int64_t> local_q_indices(const PcpLayout& layout, int64_t rank);

// The next three functions compute on each call. They describe the padded rows of all ranks, one
// rank after the other: [pcp_size padded_num_tokens].
/// The row of each token of the batch [num_tokens]; a replicated token has the row of rank 0.
std::vector<int64_t> hidden_restore_idx(const PcpLayout& layout);
/// The token of each row; 0 for padding.
std::vector<int64_t> padded_gather_idx(const PcpLayout& layout);
/// Whether a row's keys and values are written: those of one row for each token, and no padding.
std::vector<uint8_t> gathered_kv_write_mask(const PcpLayout& layout);

}  // namespace cpattn
