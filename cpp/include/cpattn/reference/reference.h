// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "cpattn/base/index_table.h"
#include "cpattn/base/key_window.h"
#include "cpattn/base/tensor_view.h"

/// The oracle: each operator once more in float64, in the shortest form that can
/// be read against its definition, sharing no code with the kernels. Inputs are
/// float64, float32, float16 or bfloat16; results are float64.
namespace cpattn::reference {

/// The factors of the numbers of a cache.
struct Scale {
  double number = 1;  // positive
  /// Replaces `number`: [1] or [num_kv_heads], positive; or one for each token and head,
  /// [num_pages, page_size, num_kv_heads], if hnd [num_pages, num_kv_heads, page_size], or
  /// [num_pages * page_size, num_kv_heads].
  std::optional<TensorView> numbers;
};

/// A batch of sequences. The last q_lens[r] of the kv_lens[r] tokens of sequence r are queries.
struct PagedAttention {
  TensorView q;        // [sum(q_lens), num_heads, head_dim]
  TensorView k_cache;  // [num_pages, page_size, num_kv_heads, head_dim]; if hnd,
                       // [num_pages, num_kv_heads, page_size, head_dim]; or
                       // [num_pages * page_size, num_kv_heads, head_dim]
  TensorView v_cache;  // the same with v_head_dim; either may be codes, too, of
                       // float8_e4m3fn, float8_e5m2 or int8
  Scale k_scale, v_scale;
  bool hnd = false;
  int64_t page_size = 0;
  std::vector<int64_t> q_lens;
  std::vector<int64_t> kv_lens;
  std::optional<std::vector<int64_t>> first_positions;  // of each; none: kv_lens - q_lens
  IndexTable block_tables;  // row r: the pages of sequence r, then anything
  double scale = 1;
  bool causal = true;                                  // key j is visible from position p if j <= p
  std::optional<std::vector<uint8_t>> causal_of_each;  // overrides causal for each sequence
  std::optional<KeyWindow> window;                     // and if p - left <= j <= p + right
  std::optional<TensorView> custom_mask;  // and if this is true: bool [sum(q_lens * kv_lens)],
                                          // row-major within each sequence
  double softcap = 0;                     // c > 0: c * tanh(score / c) after the scale
  /// Added to scores after softcap: [batch, num_heads, queries, keys] with length 1 for broadcast
  /// axes, or [num_heads, queries, keys] for each sequence if bias_of_each. -inf hides the key.
  std::vector<TensorView> bias;
  bool bias_of_each = false;
  std::optional<TensorView> alibi_slopes;   // [num_heads] or [batch, num_heads]: -slope * |j - p|
  std::optional<TensorView> relative_bias;  // [num_heads, 2 * m + 1], by j - p from -m on, clamped
  std::optional<TensorView> sinks;          // [num_heads], one more logit in the denominator
};

/// Writes out [sum(q_lens), num_heads, v_head_dim] and lse [sum(q_lens), num_heads],
/// both contiguous: the natural logarithm of the sum of exponentials, without
/// the sink. Query i of sequence r stands at p = kv_lens[r] - q_lens[r] + i; if it
/// sees no key its results are zeros and -inf. Invisible keys and values are never
/// part of a computation, so they may hold NaN.
/// Throws std::invalid_argument for shapes that do not fit and for missing pages.
void paged_attention(const PagedAttention& batch, const TensorView& out, const TensorView& lse);

/// Attention of every token over rows of kv that are named for it.
struct SparseMla {
  TensorView q;        // [num_tokens, num_heads, head_dim]
  TensorView kv;       // [num_rows, 1, head_dim]; a value is the start of its key
  IndexTable indices;  // [num_tokens, topk]; others than rows are skipped
  double scale = 1;
  int64_t v_head_dim = 0;
  std::optional<std::vector<int64_t>> topk_length;  // [num_tokens]: entries that count
  std::optional<TensorView> attn_sink;              // [num_heads], one more logit a row
};

/// Writes out [num_tokens, num_heads, v_head_dim], max_logits and lse [num_tokens, num_heads],
/// all contiguous: the largest scaled score and the logarithm of the sum of
/// exponentials, both without the sink. Without keys they are zeros, -inf and -inf.
void flash_mla_sparse_fwd(
    const SparseMla& batch,
    const TensorView& out,
    const TensorView& max_logits,
    const TensorView& lse
);

/// Merges attention over two disjoint sets of keys: out_a, out_b and out
/// [num_rows, num_heads, head_dim], lse_* [num_rows, num_heads]. A part whose
/// lse is -inf is ignored, whatever it holds.
void merge_state(
    const TensorView& out_a,
    const TensorView& lse_a,
    const TensorView& out_b,
    const TensorView& lse_b,
    const TensorView& out,
    const TensorView& lse
);

/// Scores of the lightning indexer: query i scores the keys [ks[i], ke[i]).
struct Indexer {
  TensorView q;                       // [T, H, D]
  TensorView k;                       // [S, D]
  TensorView weights;                 // [T, H]
  std::optional<TensorView> k_scale;  // [S]; none: all 1
  std::vector<int64_t> ks, ke;
};

/// Writes logits [T, S], contiguous: k_scale[j] * sum_h weights[i, h] * max(0, q[i, h] . k[j]),
/// and -inf outside [ks[i], ke[i]).
void indexer_logits(const Indexer& indexer, const TensorView& logits);

/// Writes out[i] = x[i] / sqrt(mean(x[i]^2) + eps) * weight + bias: x and out [n, dim].
void rms_norm(
    const TensorView& x,
    const TensorView& weight,
    const std::optional<TensorView>& bias,
    double eps,
    const TensorView& out
);

/// Writes out = scale * x H, H[i][j] = (-1)^popcount(i & j): x and out [n, dim].
void hadamard_transform(const TensorView& x, double scale, const TensorView& out);

/// Writes rows of the FP8 cache, bytes [n, 656], as the numbers they stand for: out [n, 576].
void dequantize_kv_rows(const TensorView& rows, const TensorView& out);

}  // namespace cpattn::reference
