// SPDX-License-Identifier: Apache-2.0
#include "ops/attention/selected_attention.h"

#include <algorithm>

#include "cpattn/attention/attention_plan.h"
#include "cpattn/base/check.h"
#include "cpattn/base/parallel.h"
#include "cpattn/base/thread_stack.h"
#include "cpattn/base/trace.h"
#include "ops/attention/kernel_hooks.h"
#include "ops/base/kernel_table.h"

namespace cpattn {
namespace {

/// The fewest heads of a token that a thread takes when there are more threads than tokens: each
/// thread packs the token's keys again, which takes as long as this many heads.
constexpr int64_t kMinHeads = 16;

int64_t heads_per_item(int64_t num_tokens, int64_t num_heads, int num_threads) {
  const int64_t parts =
      std::clamp<int64_t>(num_threads / num_tokens, 1, (num_heads + kMinHeads - 1) / kMinHeads);
  const int64_t heads = (num_heads + parts - 1) / parts;
  return parts == 1 ? heads : (heads + kMinHeads - 1) / kMinHeads * kMinHeads;
}

/// The heads of a token, from one on, in a [B, S, heads, dim] tensor.
kernels::HeadRows<void> rows_of_token(const TensorView& tensor, int64_t token, int64_t head) {
  const int64_t offset = token / tensor.shape[1] * tensor.strides[0] +
                         token % tensor.shape[1] * tensor.strides[1] + head * tensor.strides[2];
  return {
      .data = tensor.as<char>() + offset * element_size(tensor.dtype),
      .head_stride = tensor.strides[2]
  };
}

kernels::HeadRows<const void> read_only(const kernels::HeadRows<void>& rows) {
  return {rows.data, rows.token_stride, rows.head_stride};
}

kernels::AttentionTile make_tile(
    const SelectedAttention& attention,
    int64_t token,
    int64_t first_head,
    int64_t num_heads,
    const int32_t* rows,
    int64_t num_keys
) {
  const TensorView& q = attention.q;
  const int64_t place = token * q.shape[2] + first_head;
  kernels::AttentionTile tile{
      .q = read_only(rows_of_token(q, token, first_head)),
      .k = attention.k,
      .k_rope = attention.k_rope,
      .v = attention.v,
      .pages = rows,
      .page_size = 1,
      .expand = attention.expand,
      .stored_bytes = attention.stored_bytes,
      .num_tokens = 1,
      .group = static_cast<int32_t>(num_heads),
      // All heads of the call decide, so that bits do not depend on the sharing between threads.
      .precise = q.shape[2] <= kPreciseRows,
      .seen = {.kv_len = num_keys, .left = kUnboundedKeys, .right = kUnboundedKeys},
      .scale = static_cast<float>(attention.scale),
      .sinks = attention.sinks == nullptr ? nullptr : attention.sinks + first_head,
      .results = {
          .out = rows_of_token(attention.out, token, first_head),
          .lse =
              {.data = attention.lse == nullptr ? nullptr : attention.lse + place,
               .head_stride = 1},
          .max_logits = attention.max_logits == nullptr ? nullptr : attention.max_logits + place
      },
  };
  if (attention.q_rope) {
    tile.q_rope = read_only(rows_of_token(*attention.q_rope, token, first_head));
  }
  const int64_t rope_dim = attention.q_rope ? attention.q_rope->shape[3] : 0;
  set_dims(tile, q.shape[3], rope_dim, attention.v_head_dim);
  return tile;
}

}  // namespace

FlatRows flat_rows(
    const char* function, const char* name, const TensorView& tensor, int64_t width
) {
  const int rank = tensor.rank;
  check(
      (rank == 3 || rank == 4) && tensor.shape[rank - 2] == 1 && tensor.shape[rank - 1] == width,
      function, ": ", name, " must have shape [rows, 1, ", width, "] or [pages, page_size, 1, ",
      width, "], got ", ShapeOf{tensor}
  );
  check_tensor(function, name, tensor, rank);
  if (rank == 3) return {tensor.shape[0], tensor.strides[0]};
  const int64_t pages = tensor.shape[0], page_size = tensor.shape[1];
  if (page_size <= 1) return {pages * page_size, tensor.strides[0]};
  check(
      pages <= 1 || tensor.strides[0] == page_size * tensor.strides[1], function, ": the pages of ",
      name, " must follow each other, ", page_size * tensor.strides[1], " elements apart, got ",
      tensor.strides[0]
  );
  return {pages * page_size, tensor.strides[1]};
}

TensorView as_batch(const TensorView& tensor) {
  if (tensor.rank == 4) return tensor;
  TensorView batch = tensor;
  batch.rank = 4;
  batch.shape = {1, tensor.shape[0], tensor.shape[1], tensor.shape[2]};
  batch.strides = {0, tensor.strides[0], tensor.strides[1], tensor.strides[2]};
  return batch;
}

void attend_selected(const SelectedAttention& attention, SelectKeys select, int num_threads) {
  const TensorView& q = attention.q;
  const int64_t num_tokens = q.shape[0] * q.shape[1], num_heads = q.shape[2];
  if (num_tokens == 0 || num_heads == 0) return;
  check_stack(attention.function);
  const int64_t rope_dim = attention.q_rope ? attention.q_rope->shape[3] : 0;
  const auto& kernel = active_kernels().attention[element_type(attention.function, "q", q.dtype)];
  const int64_t item_heads = heads_per_item(num_tokens, num_heads, num_threads);
  const int64_t parts = (num_heads + item_heads - 1) / item_heads;
  const kernels::AttentionTile largest = make_tile(attention, 0, 0, item_heads, nullptr, 0);
  const int64_t kernel_bytes = (kernel.scratch_bytes(&largest) + 63) / 64 * 64;
  const TraceSpan call(TraceScope::call, 0, q.dtype, attention.function);
  parallel_for(num_tokens * parts, num_threads, [&](int64_t item, StopToken& stop) {
    const int64_t token = item / parts, first_head = item % parts * item_heads;
    const int64_t heads = std::min(item_heads, num_heads - first_head);
    char* scratch = static_cast<char*>(thread_scratch(
        attention.function,
        kernel_bytes + attention.max_keys * static_cast<int64_t>(sizeof(int32_t))
    ));
    auto* rows = reinterpret_cast<int32_t*>(scratch + kernel_bytes);
    const int64_t num_keys = select(token, rows);
    const int64_t flops = 2 * heads * num_keys * (q.shape[3] + rope_dim + attention.v_head_dim);
    const TraceSpan span(TraceScope::item, flops, q.dtype);
    kernels::AttentionTile tile = make_tile(attention, token, first_head, heads, rows, num_keys);
    hook_tile(tile, stop, q.dtype);
    kernel.run(&tile, scratch);
  });
}

}  // namespace cpattn
