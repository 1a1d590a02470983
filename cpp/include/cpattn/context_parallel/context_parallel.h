// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "cpattn/context_parallel/forward_mode.h"

namespace cpattn {

/// The division of the new tokens of a batch over W = cp_size ranks.
///
///   zigzag      every sequence is cut into 2 W blocks, larger ones first, whose
///               sizes differ by at most one; rank r owns blocks r ("prev") and
///               2 W - 1 - r ("next")
///   interleave  token t of the flattened batch belongs to rank t mod W
///   contiguous  rank r owns tokens [L r / W, L (r + 1) / W) of every sequence of
///               length L; all geometry is in the "prev" fields
///
/// With weights or a page_size, contiguous gives ranks work in proportion to their weights, and
/// zigzag both tokens and work; see CpBatch.
enum class CpStrategy : uint8_t { zigzag, interleave, contiguous };

/// The name of the enumerator, such as "zigzag".
std::string_view cp_strategy_name(CpStrategy strategy);

/// The strategy of that name or alias: in-seq-split and head_tail are zigzag, round-robin-split is
/// interleave. Throws std::invalid_argument, which names `function`.
CpStrategy parse_cp_strategy(std::string_view name, const char* function);

/// Whether kv_len_* counts the cached prefix (baked) or new tokens only (bare).
enum class KvLenConvention : uint8_t { baked, bare };

/// The name of the enumerator: "baked" or "bare".
std::string_view kv_len_convention_name(KvLenConvention convention);
/// The convention of that name. Throws std::invalid_argument, which names `function`.
KvLenConvention parse_kv_len_convention(std::string_view name, const char* function);

/// The largest cp_size: above any system, and small enough for int32 products of block numbers.
constexpr int64_t kMaxCpSize = int64_t{1} << 15;

/// The batch to build context-parallel metadata for. Lengths and their sums are >= 0 and fit int32.
/// seq_lens are cached prefix + new tokens; without them there is no prefix. num_tokens above the
/// sum of extend_lens pads the last sequence, num_tokens below the sum is an error.
struct CpBatch {
  using Lens = std::span<const int64_t>;

  std::optional<Lens> extend_lens;    // [bs] new tokens, bs >= 1
  std::optional<Lens> seq_lens;       // [bs]
  std::optional<int64_t> num_tokens;  // default: the sum of extend_lens
  int64_t cp_size = 1;                // 1 .. kMaxCpSize
  CpStrategy strategy = CpStrategy::zigzag;
  KvLenConvention kv_len_convention = KvLenConvention::baked;
  /// Shares of the ranks, finite and > 0, in any unit; default: all equal. The work of a token is
  /// the number of keys that it sees under a causal mask. Cuts of later sequences make up for the
  /// rounding of earlier ones.
  std::optional<std::span<const double>> weights;  // [cp_size]
  /// Blocks begin at multiples of page_size positions, cached ones counted, or with the new tokens.
  /// There are at least cp_size pages with new tokens. Interleave takes neither this nor weights.
  std::optional<int64_t> page_size;  // 1 .. 2^31 - 1
  /// Takes batches as serving engines do: seq_lens of another length mean no prefix, seq_lens below
  /// extend_lens a prefix of 0, and missing extend_lens become seq_lens, or else one sequence of
  /// num_tokens. Without compat each is an error.
  bool compat = false;
};

/// The arguments of cuts in proportion to weights.
struct CpWeights {
  std::vector<double> weights;  // [cp_size]; none: all equal
  int32_t page_size = 0;        // 0: none given

  bool operator==(const CpWeights&) const = default;
};

/// One rank's share of a batch. An immutable value, equal to another one built from equal input.
/// The arrays lie in one allocation, shared by copies (and by all ranks of
/// build_cp_metadata_all_ranks). With W = cp_size, S = the blocks per sequence (zigzag 2 W,
/// contiguous W), b_s[i] = the size of block i of sequence s and P_s = its prefix if baked, else 0:
///
///   zigzag_index            [2 bs]   blocks of this rank, as s S + i: prev of all
///                           [bs]     sequences, then next; contiguous: prev only
///   kv_len_prev, _next      [bs]     P_s + the new tokens up to the end of the block
///   actual_seq_q_prev, ...  [bs]     b_s of the block
///   cu_seqlens_*            [bs + 1] 0 and the running sums of a family; null where
///                                    those of kv_len pass int32
///   *_combined              [2 bs]   prev, then next; cumulative: [2 bs + 1]
///
/// Interleave has none of these: their data() is null, totals and maxima are 0.
/// Contiguous has no *_combined, empty next arrays, and [0] for cu_seqlens_*_next.
struct ContextParallelMetadata {
  using Ints = std::span<const int32_t>;

  CpStrategy strategy = CpStrategy::zigzag;
  KvLenConvention kv_len_convention = KvLenConvention::baked;
  bool is_physical = false;  // made by pad_to_physical
  int32_t cp_rank = 0;
  int32_t cp_size = 1;
  int32_t bs = 1;
  int32_t total_seq_lens = 0;  // new tokens, padding on the last sequence included
  int32_t total_q_prev_tokens = 0;
  int32_t total_q_next_tokens = 0;
  int32_t max_seqlen_q_prev = 0;
  int32_t max_seqlen_q_next = 0;
  int32_t max_seqlen_q_combined = 0;

  // Equal on every rank.
  Ints extend_lens;             // [bs], padding on the last sequence included
  Ints prefix_lens;             // [bs], under either convention
  Ints per_rank_actual_token;   // [cp_size] rows of each rank, physical ones if is_physical
  Ints max_rank_len;            // [cp_size] copies of their maximum
  Ints per_rank_logical_token;  // [cp_size] rows before physical padding; null unless is_physical

  Ints zigzag_index;
  Ints kv_len_prev, kv_len_next, kv_len_combined;
  Ints actual_seq_q_prev, actual_seq_q_next, actual_seq_q_combined;
  Ints cu_seqlens_q_prev, cu_seqlens_q_next, cu_seqlens_q_combined;
  Ints cu_seqlens_kv_prev, cu_seqlens_kv_next, cu_seqlens_kv_combined;

  std::shared_ptr<const CpWeights> weights;  // null without weights and page_size
  Ints cuts;  // [bs, S + 1] new tokens before each block, then all; null without weights

  std::shared_ptr<const int32_t[]> storage;  // what the spans point into
  Ints physical_rows;                        // per_rank_actual_token of pad_to_physical

  /// The numbers of rows that are tokens, of each rank [cp_size] and of this rank.
  Ints logical_rows() const { return is_physical ? per_rank_logical_token : per_rank_actual_token; }
  int32_t num_local_rows() const { return logical_rows()[cp_rank]; }

  bool operator==(const ContextParallelMetadata& other) const;
};

/// The share of one rank. Throws std::invalid_argument, which names argument, index and value, for
/// a cp_rank outside [0, cp_size) and a batch that breaks the rules of CpBatch.
ContextParallelMetadata build_cp_metadata(const CpBatch& batch, int64_t cp_rank);

/// The shares of all ranks in their order, in one allocation; arrays that do not depend on the rank
/// are stored once. Errors are those of build_cp_metadata.
std::vector<ContextParallelMetadata> build_cp_metadata_all_ranks(const CpBatch& batch);

/// Returns the plan with the same number of rows on every rank: the longest rank's,
/// rounded up to a multiple of 2 W (zigzag) or W. Nothing is copied, and a physical
/// plan is returned as it is. Throws std::invalid_argument if the rows exceed int32.
ContextParallelMetadata pad_to_physical(const ContextParallelMetadata& metadata);

// The next three functions describe the blocks of all ranks, [bs S]. They compute on each call,
// because at a large cp_size their results would outweigh the other arrays. They throw
// std::invalid_argument for interleave, which has no blocks.
/// Block sizes in token order: b_0[0 .. S), b_1[0 .. S), ...
std::vector<int32_t> split_list(const ContextParallelMetadata& metadata);
/// Block sizes in the order in which gathered ranks hold them: of each rank prev of
/// all sequences, then next.
std::vector<int32_t> reverse_split_len(const ContextParallelMetadata& metadata);
/// The place of each block of split_list in reverse_split_len.
std::vector<int32_t> cp_reverse_index(const ContextParallelMetadata& metadata);

// The next five functions describe tokens or sequences, and compute on each call. Results for local
// rows are [num_local_rows()]: logical rows only.
/// The position of each local row in the token order of the whole batch.
std::vector<int32_t> local_q_indices(const ContextParallelMetadata& metadata);
/// The sequence of each local row.
std::vector<int32_t> query_request_indices(const ContextParallelMetadata& metadata);
/// The number of keys that each local row sees under either convention: prefix + its position among
/// the new tokens + 1.
std::vector<int32_t> query_cache_lengths(const ContextParallelMetadata& metadata);
/// The row of each token of the batch [total_seq_lens] when the logical rows
/// of all ranks stand in rank order: the inverse of every rank's local_q_indices.
std::vector<int32_t> gathered_row_indices(const ContextParallelMetadata& metadata);
/// The number of local rows of each sequence [bs], zeros included. For interleave only.
std::vector<int32_t> rows_per_request(const ContextParallelMetadata& metadata);

/// The number of pairs of a new token and a key that it sees under a causal mask, by rank
/// [cp_size].
std::vector<int64_t> per_rank_pairs(const ContextParallelMetadata& metadata);
/// The largest ratio of a rank's share of all pairs to its share of the weights, equal ones if none
/// were given. 1 is perfect; a batch without new tokens has 1.
double imbalance(const ContextParallelMetadata& metadata);

/// Whether a batch may run context-parallel: cp_size > 1, a mode whose tokens
/// may be split (only interleave needs a mode), and enough tokens. Zigzag and contiguous need
/// num_tokens (default: the sum) and every sequence to have at least 2 cp_size or cp_size tokens;
/// interleave needs a sum of at least cp_size.
bool can_apply_cp(
    std::span<const int64_t> extend_lens,
    int64_t cp_size,
    CpStrategy strategy,
    std::optional<int64_t> num_tokens,
    std::optional<ForwardMode> mode
);

/// Whether a batch of a sparse-attention (DSA) model may run context-parallel as an interleaved
/// prefill. False for every other strategy.
bool can_dsa_prefill_cp_interleave(
    std::span<const int64_t> extend_lens, int64_t cp_size, CpStrategy strategy, ForwardMode mode
);

}  // namespace cpattn
