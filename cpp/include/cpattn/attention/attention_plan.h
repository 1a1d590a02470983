// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "cpattn/attention/page_table.h"
#include "cpattn/base/limits.h"

namespace cpattn {

/// Head counts and dimensions of one attention layer. head_dim and v_head_dim
/// are from 1 to 576; num_heads is a multiple of num_kv_heads.
struct AttentionShape {
  int32_t num_heads = 0;
  int32_t num_kv_heads = 0;
  int32_t head_dim = 0;
  int32_t v_head_dim = 0;
  bool operator==(const AttentionShape&) const = default;
};

/// `dim` rounded up to a multiple of 16, the dimension that kernels compute with.
constexpr int64_t padded_dim(int64_t dim) { return (dim + 15) / 16 * 16; }

/// The most rows for each KV head for which attention is memory-bound, so that reading keys and
/// values in place is faster than packing them. Wide heads are compute-bound sooner.
constexpr int64_t read_bound_rows(int64_t head_dim) { return padded_dim(head_dim) > 256 ? 8 : 16; }

/// The most rows for each KV head whose softmax weights stay unrounded unasked: on Zen 4 the second
/// product takes 1 to 5 % of decoding with 4 rows, 7 to 12 % with 8, and 10 to 15 % with 16.
constexpr int64_t kPreciseRows = 4;

/// Returns `dim` if it is from 1 to kMaxHeadDim. Otherwise throws std::invalid_argument, which
/// names `function` and `name`.
int64_t check_head_dim(const char* function, const char* name, int64_t dim);

/// Checks that kernels support queries and keys stored in these two parts; rope_dim may be 0.
/// Otherwise throws std::invalid_argument, which names `function`.
void check_head_parts(const char* function, int64_t nope_dim, int64_t rope_dim);

/// Consecutive rows of q that belong to one sequence. Row q_begin + i stands at
/// key position p = first_position + i * position_step, the step being >= 0, and sees the keys
/// [p - left, p + right], clipped to [0, kv_len). A position outside
/// [0, kv_len) is allowed; the result of a row that sees no key is zeros with LSE -inf.
struct AttentionSegment {
  int64_t q_begin = 0;
  int64_t q_len = 0;
  int64_t kv_len = 0;
  int64_t first_position = 0;
  int64_t position_step = 1;
  int64_t table_row = 0;          // the row of the page table whose pages hold the keys
  int64_t first_token = 0;        // of row q_begin among the new tokens of its sequence
  int64_t left = kUnboundedKeys;  // keys visible before a row's position; default: all
  int64_t right = 0;              // keys visible after it; 0 is causal
  bool operator==(const AttentionSegment&) const = default;
};

/// Visibility bits of a custom mask, rows padded to whole 32-bit words. Bit j of
/// row i of segment s is bit j % 8 of
/// bits[offsets[s] + i * row_bytes[s] + j / 8]; 1 means visible. Empty: no mask.
struct MaskBits {
  std::vector<int64_t> offsets;
  std::vector<int64_t> row_bytes;
  std::vector<uint8_t> bits;
  bool empty() const { return offsets.empty(); }
  bool operator==(const MaskBits&) const = default;
};

/// A box of work: tokens [first_token, first_token + num_tokens) of a segment
/// times query heads [first_head, first_head + num_heads) times keys
/// [kv_begin, kv_end). The heads read one KV head, or several if the segment is memory-bound.
struct AttentionItem {
  int32_t segment = 0;
  int32_t first_head = 0;
  int32_t num_heads = 0;
  int32_t num_tokens = 0;
  int64_t first_token = 0;
  int64_t kv_begin = 0;
  int64_t kv_end = 0;
  int32_t split = -1;              // index in AttentionPlan::splits of its split; -1: none
  bool may_read_in_place = false;  // kernels may read its keys and values without packing them
  bool precise = false;            // in bfloat16 kernels round only the result
  bool operator==(const AttentionItem&) const = default;
};

/// An item whose keys are shared out among num_parts items, its parts. Part i has the keys from
/// first_key + i * part_keys up to first_key + (i + 1) * part_keys. The results of the parts are
/// merged in their order.
struct AttentionSplit {
  int64_t first_key = 0;
  int32_t num_parts = 0;
  int32_t rows = 0;       // of every part: num_tokens * num_heads
  int64_t first_row = 0;  // where its parts begin among the rows of the parts of all splits
  bool operator==(const AttentionSplit&) const = default;
};

/// The batch that plan_attention divides: segments of rows, their pages and mask.
struct AttentionBatch {
  AttentionShape shape;
  int64_t num_rows = 0;  // of q; the results of rows outside all segments are zeros
  int64_t page_size = 0;
  int64_t num_pages = 0;
  std::vector<AttentionSegment> segments;
  PageTable pages;
  MaskBits mask;
  /// Empty, or for each row of q the first key that it may see and the one after the last, in
  /// [0, kv_len]. Both ascend within a segment.
  std::vector<int32_t> key_ranges;
  bool batch_invariant = false;  // see AttentionPlan
  bool precise = false;          // see AttentionPlan
  bool operator==(const AttentionBatch&) const = default;
};

/// Work division for one batch: made once, run for every layer. A value without
/// hidden state; it owns its arrays. The division depends on the batch alone,
/// never on the machine or the number of threads.
///
/// Segments of up to kMaxDecodeTokens tokens are also divided along their keys, at multiples of
/// part_keys from key 0, so that few long sequences keep many threads busy. Kernels may read the
/// keys of memory-bound segments, with few rows for each KV head, in place. So the bits of a row
/// depend on the lengths in its batch. With batch_invariant no segment is divided or read in place,
/// and a row has the same bits in every batch and chunk.
///
/// In bfloat16 some instruction sets also round the softmax weights before P V. None does so with
/// `precise`, or, unless the plan is batch_invariant, in short segments of up to kPreciseRows rows
/// for each KV head.
struct AttentionPlan {
  AttentionBatch batch;
  std::vector<AttentionItem> items;  // by sequence and KV head, most expensive first
  std::vector<int64_t> item_costs;   // of each item, in visible (row, key) pairs
  int64_t part_keys = 0;
  std::vector<AttentionSplit> splits;
  /// Rows of all parts. While the plan runs, each takes padded_dim(v_head_dim) +
  /// kPartialStateFloats floats; all take at most kMaxPartialBytes.
  int64_t partial_rows = 0;
  int num_threads = 0;  // 0: default_num_threads() when it runs
  bool operator==(const AttentionPlan&) const = default;
};

constexpr int64_t kMaxDecodeTokens = 16;
constexpr int64_t kMaxPartialBytes = int64_t{32} << 20;

/// Divides a batch into items. Throws std::invalid_argument, naming `function`,
/// for a shape outside AttentionShape's bounds. Segments and pages must be consistent: they are
/// checked where they are made.
AttentionPlan plan_attention(const char* function, AttentionBatch batch, int num_threads);

/// The number of (row, key) pairs of an item in which window and mask let the row see the key.
int64_t visible_pairs(const AttentionBatch& batch, const AttentionItem& item);

/// Packs a mask given as one byte for each (row, key): nonzero means visible, or hidden if
/// `inverted`. It is row-major within each segment: segment s starts at starts[s] and its rows
/// are row_strides[s] bytes apart.
MaskBits pack_mask(
    std::span<const AttentionSegment> segments,
    const uint8_t* values,
    std::span<const int64_t> starts,
    std::span<const int64_t> row_strides,
    bool inverted
);

/// Packs a mask given as bits: bit i is bit i % 8 of bits[i / 8], and 1 means visible. Segment s
/// starts at bit starts[s] and its rows are row_strides[s] bits apart.
MaskBits repack_mask(
    std::span<const AttentionSegment> segments,
    const uint8_t* bits,
    std::span<const int64_t> starts,
    std::span<const int64_t> row_strides
);

/// The usual batch: sequence r has q_lens[r] new tokens, rows of q in order, at
/// the end of kv_lens[r] keys. Throws for negative lengths and unequal sizes.
std::vector<AttentionSegment> sequence_segments(
    const char* function, std::span<const int64_t> q_lens, std::span<const int64_t> kv_lens
);

/// Makes segment r of that batch begin at positions[r]. Throws for positions outside (-2^31, 2^31),
/// and unless there is one for each segment.
void set_first_positions(
    const char* function, std::span<const int64_t> positions, std::span<AttentionSegment> segments
);

/// Lets each row see only the keys from ranges[2 * row] up to ranges[2 * row + 1]. Throws unless
/// there are two numbers for each row, within the keys of its segment, and both ascend within it.
void set_key_ranges(const char* function, std::span<const int64_t> ranges, AttentionBatch& batch);

}  // namespace cpattn
