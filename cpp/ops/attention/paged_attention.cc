// SPDX-License-Identifier: Apache-2.0
#include "cpattn/attention/paged_attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "cpattn/base/check.h"
#include "cpattn/base/page_size.h"
#include "cpattn/base/parallel.h"
#include "cpattn/base/thread_stack.h"
#include "cpattn/base/trace.h"
#include "ops/attention/kernel_hooks.h"
#include "ops/attention/split_results.h"
#include "ops/attention/tile_bias.h"
#include "ops/base/kernel_table.h"
#include "ops/base/tensor_checks.h"

namespace cpattn {
namespace {

void check_cache(
    const AttentionArguments& arguments,
    const char* name,
    const PagedCache& cache,
    const AttentionBatch& batch,
    int64_t head_dim
) {
  const char* function = arguments.function;
  if (!is_code(arguments.k.dtype)) check_dtype(function, name, cache.dtype, arguments.q.dtype);
  check(
      cache.dtype == arguments.k.dtype, function, ": ", name, " must be ", arguments.k.dtype,
      " like k_cache, got ", cache.dtype
  );
  check(
      cache.num_kv_heads == batch.shape.num_kv_heads, function, ": ", name, " must have ",
      batch.shape.num_kv_heads, " KV heads, got ", cache.num_kv_heads
  );
  check(
      cache.head_dim == head_dim, function, ": ", name, " must have head dimension ", head_dim,
      &cache == &arguments.k ? " like q, got " : ", got ", cache.head_dim
  );
  check(
      cache.page_size == batch.page_size, function, ": ", name, " must have pages of ",
      batch.page_size, " tokens as planned, got ", cache.page_size
  );
  check(
      cache.num_pages >= batch.num_pages, function, ": ", name, " must have at least the planned ",
      batch.num_pages, " pages, got ", cache.num_pages
  );
}

/// Checks the scales of a cache, which kernels apply in float32, scales of K together with
/// `factor`.
void check_kv_scale(
    const AttentionArguments& arguments,
    const char* name,
    double factor,
    const KVScale& scale,
    const PagedCache& cache,
    const AttentionBatch& batch
) {
  const char* function = arguments.function;
  const auto check_number = [&](double number) {
    check_scale(function, name, number);
    check_scale(function, concat("scale * ", name).c_str(), number * factor);
  };
  check_number(scale.tensor);
  if (scale.heads) {
    check_dtype(function, name, scale.heads->dtype, DType::float32);
    check_rows(function, name, *scale.heads, {batch.shape.num_kv_heads});
    for (int64_t head = 0; head < batch.shape.num_kv_heads; ++head) {
      check_number(double{scale.heads->as<float>()[head]} * scale.tensor);
    }
  }
  if (!scale.tokens) return;
  check(
      is_code(cache.dtype), function, ": ", name, " of each token is for caches of float8_e4m3fn, ",
      "float8_e5m2 or int8, got a cache of ", cache.dtype
  );
  element_type(function, name, scale.tokens->dtype);
  check(
      scale.tokens->num_kv_heads == batch.shape.num_kv_heads &&
          scale.tokens->page_size == batch.page_size && scale.tokens->num_pages >= batch.num_pages,
      function, ": ", name, " must have a number for each of ", batch.num_pages, " pages of ",
      batch.page_size, " tokens and ", batch.shape.num_kv_heads, " KV heads, got shape ",
      ShapeOf{scale.tokens->tensor}
  );
}

void check_no_input_overlap(
    const AttentionArguments& arguments, const char* out_name, const TensorView& out
) {
  const auto against = [&](const char* name, const TensorView& input) {
    check_no_overlap(arguments.function, out_name, out, name, input);
  };
  against("q", arguments.q);
  against("k_cache", arguments.k.tensor);
  against("v_cache", arguments.v.tensor);
  const auto against_scale = [&](const char* name, const KVScale& scale) {
    if (scale.heads) against(name, *scale.heads);
    if (scale.tokens) against(name, scale.tokens->tensor);
  };
  against_scale("k_scale", arguments.k_scale);
  against_scale("v_scale", arguments.v_scale);
  if (arguments.q_rope) against("q_rope", *arguments.q_rope);
  if (arguments.k_rope) against("k_rope", arguments.k_rope->tensor);
  if (arguments.sinks) against("sinks", *arguments.sinks);
  for_tensors(arguments.bias, against);
}

int64_t rope_dim(const AttentionArguments& arguments) {
  return arguments.q_rope ? arguments.q_rope->shape[2] : 0;
}

void check_arguments(const AttentionPlan& plan, const AttentionArguments& arguments) {
  const char* function = arguments.function;
  const AttentionBatch& batch = plan.batch;
  const AttentionShape& shape = batch.shape;
  element_type(function, "q", arguments.q.dtype);
  const int64_t rope = rope_dim(arguments);
  check(
      rope < shape.head_dim, function, ": the rope part of q must be below head_dim (",
      shape.head_dim, "), got ", rope
  );
  const int64_t head_dim = shape.head_dim - rope;
  check_head_parts(function, head_dim, rope);
  check_rows(function, "q", arguments.q, {batch.num_rows, shape.num_heads, head_dim});
  check_cache(arguments, "k_cache", arguments.k, batch, head_dim);
  check_cache(arguments, "v_cache", arguments.v, batch, shape.v_head_dim);
  if (arguments.q_rope) {
    check_dtype(function, "q_rope", arguments.q_rope->dtype, arguments.q.dtype);
    check_rows(function, "q_rope", *arguments.q_rope, {batch.num_rows, shape.num_heads, rope});
    check_cache(arguments, "k_rope", *arguments.k_rope, batch, rope);
  }
  check_scale(function, "scale", arguments.scale);
  check_kv_scale(arguments, "k_scale", arguments.scale, arguments.k_scale, arguments.k, batch);
  check_kv_scale(arguments, "v_scale", 1, arguments.v_scale, arguments.v, batch);
  check_softcap(function, arguments.softcap);
  check_bias(function, arguments.bias, batch);
  if (arguments.sinks) {
    check_dtype(function, "sinks", arguments.sinks->dtype, DType::float32);
    check_rows(function, "sinks", *arguments.sinks, {shape.num_heads});
  }
  check_dtype(function, "out", arguments.out.dtype, arguments.q.dtype);
  check_rows(function, "out", arguments.out, {batch.num_rows, shape.num_heads, shape.v_head_dim});
  check_no_input_overlap(arguments, "out", arguments.out);
  if (arguments.lse) {
    check_dtype(function, "lse", arguments.lse->dtype, DType::float32);
    check_shape(function, "lse", *arguments.lse, {batch.num_rows, shape.num_heads});
    check_no_input_overlap(arguments, "lse", *arguments.lse);
    check_no_overlap(function, "lse", *arguments.lse, "out", arguments.out);
  }
}

char* element_address(const TensorView& tensor, int64_t offset) {
  return static_cast<char*>(tensor.data) + offset * element_size(tensor.dtype);
}

/// Writes rows [begin, end) of the results as those of rows without visible keys: zeros and -inf.
void clear_rows(const AttentionArguments& arguments, int64_t begin, int64_t end) {
  const TensorView& out = arguments.out;
  for (int64_t row = begin; row < end; ++row) {
    for (int64_t head = 0; head < out.shape[1]; ++head) {
      std::memset(
          element_address(out, row * out.strides[0] + head * out.strides[1]), 0,
          out.shape[2] * element_size(out.dtype)
      );
      if (arguments.lse) {
        const TensorView& lse = *arguments.lse;
        lse.as<float>()[row * lse.strides[0] + head * lse.strides[1]] =
            -std::numeric_limits<float>::infinity();
      }
    }
  }
}

/// Clears the rows that belong to no segment, such as physical padding.
void clear_rows_outside(const AttentionBatch& batch, const AttentionArguments& arguments) {
  std::vector<std::pair<int64_t, int64_t>> owned;
  for (const AttentionSegment& segment : batch.segments) {
    if (segment.q_len > 0) owned.emplace_back(segment.q_begin, segment.q_begin + segment.q_len);
  }
  std::sort(owned.begin(), owned.end());
  int64_t next = 0;
  for (const auto& [begin, end] : owned) {
    clear_rows(arguments, next, begin);
    next = end;
  }
  clear_rows(arguments, next, batch.num_rows);
}

kernels::PagedRows rows_of_head(const PagedCache& cache, int64_t kv_head) {
  const int64_t offset = kv_head * cache.head_stride * element_size(cache.dtype);
  return {
      static_cast<const char*>(cache.data) + offset, cache.page_stride, cache.row_stride,
      cache.head_stride
  };
}

kernels::RowFactors row_factors(const KVScale& scale, int64_t kv_head) {
  if (!scale.tokens) return {};
  const kernels::ElementType type = element_type("", "", scale.tokens->dtype);
  return {rows_of_head(*scale.tokens, kv_head), type};
}

const float* head_factors(const KVScale& scale, int64_t kv_head) {
  return scale.heads ? scale.heads->as<float>() + kv_head : nullptr;
}

int64_t useful_flops(const AttentionBatch& batch, const AttentionItem& item) {
  return 2 * visible_pairs(batch, item) * (batch.shape.head_dim + batch.shape.v_head_dim);
}

/// The rows of an item in a tensor [rows, heads, ...].
template <class Data>
kernels::HeadRows<Data> rows_of_item(
    const AttentionPlan& plan, const AttentionItem& item, const TensorView& tensor
) {
  const int64_t row = plan.batch.segments[item.segment].q_begin + item.first_token;
  const int64_t offset = row * tensor.strides[0] + item.first_head * tensor.strides[1];
  void* data = element_address(tensor, offset);
  return {static_cast<Data*>(data), tensor.strides[0], tensor.strides[1]};
}

/// Adds the optional parts of a call to a tile: rope, mask, key ranges and lse.
void add_options(
    const AttentionPlan& plan,
    const AttentionItem& item,
    const AttentionArguments& arguments,
    int64_t kv_head,
    kernels::AttentionTile& tile
) {
  const AttentionBatch& batch = plan.batch;
  if (tile.rope_dim > 0) {
    tile.q_rope = rows_of_item<const void>(plan, item, *arguments.q_rope);
    tile.k_rope = rows_of_head(*arguments.k_rope, kv_head);
  }
  if (!batch.mask.empty()) {
    tile.seen.mask_stride = batch.mask.row_bytes[item.segment];
    tile.seen.mask = batch.mask.bits.data() + batch.mask.offsets[item.segment] +
                     item.first_token * tile.seen.mask_stride;
  }
  if (!batch.key_ranges.empty()) {
    const int64_t row = batch.segments[item.segment].q_begin + item.first_token;
    tile.seen.key_ranges = batch.key_ranges.data() + 2 * row;
  }
  if (arguments.lse) tile.results.lse = rows_of_item<float>(plan, item, *arguments.lse);
}

kernels::AttentionTile make_tile(
    const AttentionPlan& plan,
    const AttentionItem& item,
    const AttentionArguments& arguments,
    StopToken& stop
) {
  const AttentionBatch& batch = plan.batch;
  const AttentionSegment& segment = batch.segments[item.segment];
  const int32_t group = batch.shape.num_heads / batch.shape.num_kv_heads;
  const int64_t kv_head = item.first_head / group;
  const int64_t rope = rope_dim(arguments);
  kernels::AttentionTile tile{
      .q = rows_of_item<const void>(plan, item, arguments.q),
      .k = rows_of_head(arguments.k, kv_head),
      .v = rows_of_head(arguments.v, kv_head),
      .pages = batch.pages.page_ids.data() + batch.pages.indptr[segment.table_row],
      .page_size = batch.page_size,
      .codes =
          {.k_factors = row_factors(arguments.k_scale, kv_head),
           .v_factors = row_factors(arguments.v_scale, kv_head)},
      .num_tokens = item.num_tokens,
      .group = std::min(item.num_heads, group),
      .num_kv_heads = (item.num_heads + group - 1) / group,
      .seen =
          {.kv_begin = item.kv_begin,
           .kv_len = item.kv_end,
           .first_position = segment.first_position + item.first_token * segment.position_step,
           .position_step = segment.position_step,
           .left = segment.left,
           .right = segment.right},
      .scale = static_cast<float>(arguments.scale * arguments.k_scale.tensor),
      .v_factor = static_cast<float>(arguments.v_scale.tensor),
      .k_head_factors = head_factors(arguments.k_scale, kv_head),
      .v_head_factors = head_factors(arguments.v_scale, kv_head),
      .softcap = static_cast<float>(arguments.softcap),
      .bias = tile_bias(arguments.bias, batch, item),
      .sinks = arguments.sinks ? arguments.sinks->as<float>() + item.first_head : nullptr,
      .results = {.out = rows_of_item<void>(plan, item, arguments.out)},
  };
  set_dims(tile, batch.shape.head_dim - rope, rope, batch.shape.v_head_dim);
  hook_tile(tile, stop, arguments.q.dtype);
  add_options(plan, item, arguments, kv_head, tile);
  return tile;
}

}  // namespace

AttentionShape attention_shape(const AttentionArguments& arguments) {
  const auto narrow = [&](const char* name, int64_t value) {
    check(value <= INT32_MAX, arguments.function, ": ", name, " must fit into int32, got ", value);
    return static_cast<int32_t>(value);
  };
  check_tensor(arguments.function, "q", arguments.q, 3);
  return {
      .num_heads = narrow("num_heads", arguments.q.shape[1]),
      .num_kv_heads = narrow("num_kv_heads", arguments.k.num_kv_heads),
      .head_dim = narrow("head_dim", arguments.q.shape[2] + rope_dim(arguments)),
      .v_head_dim = narrow("v_head_dim", arguments.v.head_dim),
  };
}

void run_attention(const AttentionPlan& plan, const AttentionArguments& arguments) {
  check_arguments(plan, arguments);
  if (!plan.items.empty()) check_stack(arguments.function);
  const int threads = plan.num_threads > 0 ? plan.num_threads : default_num_threads();
  const auto& kernel =
      active_kernels().attention[element_type(arguments.function, "q", arguments.q.dtype)];
  const TraceSpan call(TraceScope::call, 0, arguments.q.dtype, arguments.function);
  clear_rows_outside(plan.batch, arguments);
  const std::optional<kernels::CodeType> codes = code_type(arguments.k.dtype);
  const auto num_items = static_cast<int64_t>(plan.items.size());
  SplitResults splits(plan);
  parallel_for(num_items, threads, [&](int64_t index, StopToken& stop) {
    const AttentionItem& item = plan.items[index];
    const TraceSpan span(
        TraceScope::item, tracing() ? useful_flops(plan.batch, item) : 0, arguments.q.dtype
    );
    kernels::AttentionTile tile = make_tile(plan, item, arguments, stop);
    if (codes) {
      tile.codes.type = *codes;
      tile.codes.expand = kernel.expand_codes[*codes];
    }
    tile.results.partial = splits.results_of(item);
    tile.may_read_in_place = item.may_read_in_place;
    tile.precise = item.precise;
    void* scratch = thread_scratch(arguments.function, kernel.scratch_bytes(&tile));
    if (!kernel.run(&tile, scratch)) return;
    if (const float* parts = splits.finish(item)) {
      const TraceSpan merging(TraceScope::merge);
      kernel.merge(&tile, parts, plan.splits[item.split].num_parts);
    }
  });
}

}  // namespace cpattn
