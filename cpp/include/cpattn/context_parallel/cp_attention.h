// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>

#include "cpattn/attention/attention_plan.h"
#include "cpattn/base/index_table.h"
#include "cpattn/base/tensor_view.h"
#include "cpattn/context_parallel/context_parallel.h"

namespace cpattn {

/// One layer of context-parallel attention on one rank, flat as engines hold it.
struct CpAttentionArguments {
  TensorView q;        // [rows, num_heads * head_dim]: this rank's logical rows (zigzag: all prev
                       // blocks, then all next blocks), then any number of pad rows
  TensorView k_cache;  // contiguous, num_pages * page_size * num_kv_heads * head_dim elements
  TensorView v_cache;  // contiguous, with v_head_dim for head_dim; the sizes imply which
  IndexTable block_tables;  // [bs, pages]: the pages of each sequence, prefix included
  int64_t page_size = 0;
  int64_t num_heads = 0;
  int64_t num_kv_heads = 0;
  double scale = 1;
  TensorView out;                 // [rows, num_heads * v_head_dim]
  std::optional<TensorView> lse;  // float32 [rows, num_heads]
};

/// Attention of a rank's tokens over the whole paged sequences, prefix included:
/// what sglang's AscendAttnBackend.do_cp_attn_fia computes, for any batch size
/// and strategy. All blocks of all sequences go through one plan. Under
/// interleave the rows of a sequence stand cp_size positions apart. Pad rows are
/// never read and come out as zeros with LSE -inf.
///
/// Throws std::invalid_argument for bare metadata of a batch with a prefix (its
/// lengths do not say where the keys end), for fewer rows than the metadata
/// has, for a kv length beyond the block table, and for shapes that do not fit.
void do_cp_attn_fia(const ContextParallelMetadata& metadata, const CpAttentionArguments& arguments);

/// The segments of this rank's rows.
std::vector<AttentionSegment> cp_segments(const ContextParallelMetadata& metadata);

}  // namespace cpattn
