// SPDX-License-Identifier: Apache-2.0
#include "cpattn/context_parallel/cp_attention.h"

#include <utility>

#include "cpattn/attention/paged_attention.h"
#include "cpattn/base/check.h"
#include "cpattn/base/page_size.h"
#include "ops/attention/key_visibility.h"
#include "ops/attention/tile_bias.h"
#include "ops/context_parallel/flat_caches.h"
#include "ops/context_parallel/sequence_keys.h"

namespace cpattn {
namespace {

constexpr char kFunction[] = "do_cp_attn_fia";

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

/// Returns [rows, heads * dim] as [rows, heads, dim].
TensorView split_heads(const TensorView& flat, int64_t num_heads) {
  TensorView view = flat;
  view.rank = 3;
  view.shape = {flat.shape[0], num_heads, flat.shape[1] / num_heads};
  view.strides = {flat.strides[0], view.shape[2], 1};
  return view;
}

/// The dimensions of queries that are stored apart; 0: none are.
int64_t checked_rope_dim(const CpAttentionArguments& arguments) {
  check(
      arguments.q_rope.has_value() == arguments.k_rope.has_value(), kFunction,
      ": q_rope and k_rope must be given together"
  );
  if (!arguments.q_rope) return 0;
  check_tensor(kFunction, "q_rope", *arguments.q_rope, 2);
  const int64_t columns = arguments.q_rope->shape[1];
  check(
      columns % arguments.num_heads == 0, kFunction, ": q_rope must have a multiple of num_heads (",
      arguments.num_heads, ") columns, got ", columns
  );
  return check_head_dim(kFunction, "the dimension of q_rope", columns / arguments.num_heads);
}

/// The numbers of new tokens and keys of each sequence.
std::vector<SequenceLens> sequence_lens(const ContextParallelMetadata& metadata) {
  std::vector<SequenceLens> lens;
  for (std::size_t s = 0; s < metadata.extend_lens.size(); ++s) {
    const int64_t extend = metadata.extend_lens[s];
    lens.push_back({extend, metadata.prefix_lens[s] + extend});
  }
  return lens;
}

/// The rows of this rank, and the keys that they see.
AttentionBatch batch_of(
    const ContextParallelMetadata& metadata,
    const CpAttentionArguments& arguments,
    const AttentionShape& shape,
    int64_t num_pages
) {
  AttentionBatch batch{
      .shape = shape,
      .num_rows = arguments.q.shape[0],
      .page_size = arguments.page_size,
      .num_pages = num_pages,
      .segments = cp_segments(metadata, arguments.visibility.causal),
      .batch_invariant = true,  // of the split of sequences over ranks
      .precise = arguments.precise,
  };
  const std::vector<int64_t> kv_lens =
      keys_per_sequence(batch.segments, metadata.bs, [](const AttentionSegment& segment) {
        return segment.q_len == 0 ? 0 : segment.kv_len;
      });
  batch.pages = page_table_from_blocks(
      kFunction, arguments.block_tables, kv_lens, arguments.page_size, num_pages
  );
  set_visibility(kFunction, arguments.visibility, sequence_lens(metadata), batch);
  return batch;
}

}  // namespace

void do_cp_attn_fia(
    const ContextParallelMetadata& metadata, const CpAttentionArguments& arguments
) {
  const int64_t head_dim = checked_head_dim(arguments);
  const int64_t rope_dim = checked_rope_dim(arguments);
  const FlatCaches caches = flat_caches(kFunction, arguments, head_dim, rope_dim);
  check_no_bare_prefix(metadata);
  check(
      arguments.q.shape[0] >= metadata.num_local_rows(), kFunction, ": q must have at least the ",
      metadata.num_local_rows(), " rows that the metadata gives rank ", metadata.cp_rank, ", got ",
      arguments.q.shape[0]
  );
  const int64_t v_head_dim = caches.v.head_dim;
  check_tensor(kFunction, "out", arguments.out, 2);
  check(
      arguments.out.shape[1] == arguments.num_heads * v_head_dim, kFunction, ": out must have ",
      arguments.num_heads * v_head_dim, " columns, got ", arguments.out.shape[1]
  );
  const AttentionShape shape{
      .num_heads = narrow_to_int32(arguments.num_heads, kFunction),
      .num_kv_heads = narrow_to_int32(arguments.num_kv_heads, kFunction),
      .head_dim = narrow_to_int32(head_dim + rope_dim, kFunction),
      .v_head_dim = narrow_to_int32(v_head_dim, kFunction),
  };
  AttentionArguments layer{
      .function = kFunction,
      .q = split_heads(arguments.q, arguments.num_heads),
      .k = caches.k,
      .v = caches.v,
      .k_scale = arguments.k_scale,
      .v_scale = arguments.v_cache ? arguments.v_scale : arguments.k_scale,
      .k_rope = caches.k_rope,
      .scale = arguments.scale,
      .softcap = arguments.softcap,
      .bias = arguments.bias,
      .sinks = arguments.sinks,
      .out = split_heads(arguments.out, arguments.num_heads),
      .lse = arguments.lse,
  };
  if (arguments.q_rope) layer.q_rope = split_heads(*arguments.q_rope, arguments.num_heads);
  check_bias(kFunction, arguments.bias, shape.num_heads, sequence_lens(metadata));
  AttentionBatch batch = batch_of(metadata, arguments, shape, caches.k.num_pages);
  run_attention(plan_attention(kFunction, std::move(batch), /*num_threads=*/0), layer);
}

}  // namespace cpattn
