// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "cpattn/attention/attention_plan.h"
#include "cpattn/attention/key_visibility.h"
#include "cpattn/attention/paged_attention.h"
#include "cpattn/base/index_table.h"
#include "cpattn/base/tensor_view.h"
#include "cpattn/context_parallel/context_parallel.h"

namespace cpattn {

/// One layer of context-parallel attention on one rank, with flat tensors. Flat caches are
/// contiguous, with num_pages * page_size * num_kv_heads * dim elements; the sizes imply the
/// dimensions of keys and values. Caches with all axes may have any strides except the last, such
/// as some heads of a larger cache.
struct CpAttentionArguments {
  TensorView q;        // [rows, num_heads * head_dim]: this rank's logical rows (zigzag: all prev
                       // blocks, then all next blocks), then any number of pad rows
  TensorView k_cache;  // of head_dim
  std::optional<TensorView> v_cache;  // of v_head_dim; null: values are the first v_head_dim
  std::optional<int64_t> v_head_dim;  // dimensions of keys in k_cache. Given if v_cache is null
  std::optional<TensorView> q_rope;   // [rows, num_heads * rope_dim]: the last dimensions of
  std::optional<TensorView> k_rope;   // queries and keys, stored apart; of rope_dim
  KVScale k_scale, v_scale;  // as of run_attention; without v_cache k_scale is that of values, too
  IndexTable block_tables;   // [bs, pages]: the pages of each sequence, prefix included
  int64_t page_size = 0;
  int64_t num_heads = 0;
  int64_t num_kv_heads = 0;
  double scale = 1;
  KeyVisibility visibility;  // masks are those of the whole sequences: extend_lens by prefix +
                             // extend_lens, the same on every rank
  double softcap = 0;        // c > 0: c * tanh(scaled score / c)
  ScoreBias bias;            // of the whole sequences, like masks
  std::optional<TensorView> sinks;  // float32 [num_heads], one more logit a row
  bool precise = false;             // in bfloat16 only the result is rounded
  TensorView out;                   // [rows, num_heads * v_head_dim]
  std::optional<TensorView> lse;    // float32 [rows, num_heads]
};

/// Attention of a rank's tokens over the whole paged sequences, prefix included:
/// the result of sglang's AscendAttnBackend.do_cp_attn_fia, for any batch size and strategy. All
/// blocks of all sequences go through one plan. Under interleave the rows of a sequence stand
/// cp_size positions apart. Pad rows are never read and come out as zeros with LSE -inf. A row's
/// bits are those of a single rank.
///
/// Padding tokens of the metadata are tokens of the last sequence: without `causal` its other
/// tokens see their keys, too.
///
/// Throws std::invalid_argument for bare metadata of a batch with a prefix (its
/// lengths do not say where the keys end), for fewer rows than the metadata
/// has, for a kv length beyond the block table, and for shapes that do not fit.
void do_cp_attn_fia(const ContextParallelMetadata& metadata, const CpAttentionArguments& arguments);

/// The segments of this rank's rows. The keys of a segment end with its last row; without `causal`
/// they end with the sequence.
std::vector<AttentionSegment> cp_segments(
    const ContextParallelMetadata& metadata, bool causal = true
);

}  // namespace cpattn
