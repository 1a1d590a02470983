// SPDX-License-Identifier: Apache-2.0
#include "cpattn/context_parallel/cp_attention.h"

#include <utility>

#include "cpattn/attention/paged_attention.h"
#include "cpattn/base/check.h"
#include "cpattn/base/page_size.h"
#include "ops/context_parallel/sequence_keys.h"

namespace cpattn {
namespace {

constexpr char kFunction[] = "do_cp_attn_fia";

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

void check_no_bare_prefix(const ContextParallelMetadata& metadata) {
  if (metadata.kv_len_convention == KvLenConvention::baked) return;
  for (std::size_t s = 0; s < metadata.prefix_lens.size(); ++s) {
    check(
        metadata.prefix_lens[s] == 0, kFunction,
        ": metadata with bare kv lengths cannot describe a cached prefix, got prefix ",
        metadata.prefix_lens[s], " of sequence ", s, "; build it with kv_len_convention='baked'"
    );
  }
}

/// Throws where the axes of a cache contradict [num_pages, page_size, num_kv_heads, dim]: each
/// must be one of those, or several of them in one.
void check_cache_axes(
    const char* name, const TensorView& cache, const CpAttentionArguments& arguments, int64_t dim
) {
  const int64_t token = arguments.num_kv_heads * dim;
  const int64_t page = arguments.page_size * token;
  const int64_t elements = cache.num_elements();
  int64_t behind = 1;  // elements of the axes behind the one in turn
  bool fits = true;
  for (int axis = cache.rank - 1; axis > 0; --axis) {
    behind *= cache.shape[axis];
    fits = fits && (behind == 1 || behind == dim || behind == token || behind == page ||
                    behind == elements);
  }
  check(
      fits, kFunction, ": ", name, " must be [num_pages, page_size, num_kv_heads, dim] with ",
      "page_size ", arguments.page_size, ", num_kv_heads ", arguments.num_kv_heads, " and dim ",
      dim, ", or have some of these axes joined, got shape ", ShapeOf{cache}
  );
}

int64_t checked_pages(const CpAttentionArguments& arguments, int64_t head_dim) {
  const int64_t page_elements = arguments.page_size * arguments.num_kv_heads * head_dim;
  const int64_t elements = arguments.k_cache.num_elements();
  check(
      elements % page_elements == 0, kFunction,
      ": k_cache must hold a multiple of page_size * num_kv_heads * head_dim = ", page_elements,
      " elements, got ", elements, " (shape ", ShapeOf{arguments.k_cache}, ")"
  );
  check_cache_axes("k_cache", arguments.k_cache, arguments, head_dim);
  return elements / page_elements;
}

/// Bounds a number of heads, so that its products with a page_size and a dimension fit into int64.
void check_heads(const char* name, int64_t heads) {
  constexpr int64_t kMost = 1 << 16;
  check(
      heads >= 1 && heads <= kMost, kFunction, ": ", name, " must be in [1, ", kMost, "], got ",
      heads
  );
}

int64_t checked_head_dim(const CpAttentionArguments& arguments) {
  check_page_size(kFunction, arguments.page_size);
  check_heads("num_heads", arguments.num_heads);
  check_heads("num_kv_heads", arguments.num_kv_heads);
  check_tensor(kFunction, "q", arguments.q, 2);
  check(
      arguments.q.shape[1] % arguments.num_heads == 0, kFunction,
      ": q must have a multiple of num_heads (", arguments.num_heads, ") columns, got ",
      arguments.q.shape[1]
  );
  return check_head_dim(kFunction, "head_dim", arguments.q.shape[1] / arguments.num_heads);
}

/// The dimension of values that the sizes of the caches imply.
int64_t checked_v_head_dim(const CpAttentionArguments& arguments, int64_t num_pages) {
  const int64_t elements = arguments.v_cache.num_elements();
  const int64_t head_rows = num_pages * arguments.page_size * arguments.num_kv_heads;
  check(
      head_rows > 0 && elements > 0 && elements % head_rows == 0, kFunction,
      ": v_cache must hold a multiple of num_pages * page_size * num_kv_heads = ", head_rows,
      " elements (num_pages from k_cache), got ", elements
  );
  check_cache_axes("v_cache", arguments.v_cache, arguments, elements / head_rows);
  return elements / head_rows;
}

/// Returns [rows, heads * dim] as [rows, heads, dim].
TensorView split_heads(const TensorView& flat, int64_t num_heads) {
  TensorView view = flat;
  view.rank = 3;
  view.shape = {flat.shape[0], num_heads, flat.shape[1] / num_heads};
  view.strides = {flat.strides[0], view.shape[2], 1};
  return view;
}

PagedCache flat_cache(
    const char* name,
    const TensorView& cache,
    const CpAttentionArguments& arguments,
    int64_t num_pages,
    int64_t head_dim
) {
  check(cache.is_contiguous(), kFunction, ": ", name, " must be contiguous");
  const int64_t row = arguments.num_kv_heads * head_dim;
  return {
      .data = cache.data,
      .dtype = cache.dtype,
      .num_pages = num_pages,
      .page_size = arguments.page_size,
      .num_kv_heads = arguments.num_kv_heads,
      .head_dim = head_dim,
      .page_stride = arguments.page_size * row,
      .row_stride = row,
      .head_stride = head_dim,
      .tensor = cache,
  };
}

}  // namespace

std::vector<AttentionSegment> cp_segments(const ContextParallelMetadata& metadata) {
  if (metadata.strategy == CpStrategy::interleave) return interleaved_segments(metadata);
  std::vector<AttentionSegment> segments;
  append_blocks(metadata.actual_seq_q_prev, metadata.kv_len_prev, 0, segments);
  append_blocks(
      metadata.actual_seq_q_next, metadata.kv_len_next, metadata.total_q_prev_tokens, segments
  );
  return segments;
}

void do_cp_attn_fia(
    const ContextParallelMetadata& metadata, const CpAttentionArguments& arguments
) {
  const int64_t head_dim = checked_head_dim(arguments);
  const int64_t num_pages = checked_pages(arguments, head_dim);
  const int64_t v_head_dim = checked_v_head_dim(arguments, num_pages);
  check_no_bare_prefix(metadata);
  check(
      arguments.q.shape[0] >= metadata.num_local_rows(), kFunction, ": q must have at least the ",
      metadata.num_local_rows(), " rows that the metadata gives rank ", metadata.cp_rank, ", got ",
      arguments.q.shape[0]
  );
  check_tensor(kFunction, "out", arguments.out, 2);
  check(
      arguments.out.shape[1] == arguments.num_heads * v_head_dim, kFunction, ": out must have ",
      arguments.num_heads * v_head_dim, " columns, got ", arguments.out.shape[1]
  );

  AttentionBatch batch{
      .shape =
          {.num_heads = narrow_to_int32(arguments.num_heads, kFunction),
           .num_kv_heads = narrow_to_int32(arguments.num_kv_heads, kFunction),
           .head_dim = narrow_to_int32(head_dim, kFunction),
           .v_head_dim = narrow_to_int32(v_head_dim, kFunction)},
      .num_rows = arguments.q.shape[0],
      .page_size = arguments.page_size,
      .num_pages = num_pages,
      .segments = cp_segments(metadata),
      .left = kUnboundedKeys,
      .right = 0,
      .batch_invariant = true,  // of how the sequences are split over ranks
  };
  const std::vector<int64_t> kv_lens =
      keys_per_sequence(batch.segments, metadata.bs, [](const AttentionSegment& segment) {
        return segment.q_len == 0 ? 0 : segment.kv_len;
      });
  batch.pages = page_table_from_blocks(
      kFunction, arguments.block_tables, kv_lens, arguments.page_size, num_pages
  );
  run_attention(
      plan_attention(kFunction, std::move(batch), /*num_threads=*/0),
      {.function = kFunction,
       .q = split_heads(arguments.q, arguments.num_heads),
       .k = flat_cache("k_cache", arguments.k_cache, arguments, num_pages, head_dim),
       .v = flat_cache("v_cache", arguments.v_cache, arguments, num_pages, v_head_dim),
       .scale = arguments.scale,
       .out = split_heads(arguments.out, arguments.num_heads),
       .lse = arguments.lse}
  );
}

}  // namespace cpattn
