// SPDX-License-Identifier: Apache-2.0
#include "cpattn/npu/fia.h"

#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include "cpattn/base/check.h"
#include "ops/base/kernel_table.h"
#include "ops/npu/fia_antiquant.h"
#include "ops/npu/fia_layout.h"
#include "ops/npu/fia_mask.h"
#include "ops/npu/fia_sequences.h"

namespace cpattn {
namespace {

using fia::kFunction;
using fia::Layout;
using fia::require;

/// Segments and pages of the sequences [first, last), which one run computes.
AttentionBatch make_batch(
    const fia::Sequences& sequences,
    const PageTable& pages,
    const fia::Band& band,
    int64_t first,
    int64_t last
) {
  AttentionBatch batch;
  for (int64_t b = first; b < last; ++b) {
    const int64_t corner =
        band.right_down ? sequences.kv_lens[b] - sequences.q_lens[b] : int64_t{0};
    batch.segments.push_back({
        .q_begin = sequences.q_begins[b] - sequences.q_begins[first],
        .q_len = sequences.q_lens[b],
        .kv_len = sequences.kv_lens[b],
        .first_position = corner + band.shift,
        .table_row = b - first,
        .left = band.left,
        .right = band.right,
    });
    for (int64_t i = pages.indptr[b]; i < pages.indptr[b + 1]; ++i) {
      batch.pages.page_ids.push_back(pages.page_ids[i]);
    }
    batch.pages.indptr.push_back(static_cast<int64_t>(batch.pages.page_ids.size()));
  }
  return batch;
}

/// Makes the keys of a batch's only sequence one page.
void use_one_page(AttentionBatch& batch) {
  const int64_t kv_len = batch.segments[0].kv_len;
  batch.page_size = std::max<int64_t>(kv_len, 1);
  batch.num_pages = 1;
  batch.pages.page_ids.assign(kv_len > 0 ? 1 : 0, 0);
  batch.pages.indptr.back() = kv_len > 0 ? 1 : 0;
}

bool wants_lse(const FiaPlan& plan) { return plan.lse_shape.size() > 1; }

/// Whether query, out and lse each have one stride from row to row.
bool runs_together(const FiaPlan& plan) {
  const bool several = plan.query.shape[0] > 1 && plan.query.shape[1] > 1;
  const bool heads_outside = plan.out_axes == "BNSD" || wants_lse(plan);
  return fia::has_uniform_rows(plan.query) &&
         (!plan.query_rope || fia::has_uniform_rows(*plan.query_rope)) &&
         !(several && heads_outside);
}

std::vector<int64_t> shape_of(std::string_view axes, const TensorView& query, int64_t v_head_dim) {
  std::vector<int64_t> shape;
  for (const char axis : axes) {
    shape.push_back(
        axis == 'B'                  ? query.shape[0]
        : axis == 'S' || axis == 'T' ? query.shape[1]
        : axis == 'N'                ? query.shape[2]
        : axis == 'H'                ? query.shape[2] * v_head_dim
                                     : v_head_dim
    );
  }
  return shape;
}

void check_like_query(const FiaArguments& arguments, const char* name, const TensorView& tensor) {
  require(
      tensor.dtype == arguments.query.dtype, name, " must be ", arguments.query.dtype,
      " like query, got ", tensor.dtype
  );
}

PagedCache read_cache(
    const FiaArguments& arguments,
    const char* name,
    const TensorView& tensor,
    const Layout& layout,
    int64_t num_kv_heads
) {
  if (tensor.dtype != DType::int8) check_like_query(arguments, name, tensor);
  if (!arguments.block_table) {
    return fia::contiguous_blocks(name, tensor, layout, num_kv_heads);
  }
  const bool by_head = layout.packed() || layout.input == "BNSD";
  return fia::paged_blocks(name, tensor, num_kv_heads, arguments.block_size, by_head);
}

void check_same_blocks(const char* name, const PagedCache& cache, const PagedCache& key) {
  require(
      cache.num_pages == key.num_pages && cache.page_size == key.page_size, name,
      " must hold the tokens that key holds (", ShapeOf{key.tensor}, "), got shape ",
      ShapeOf{cache.tensor}
  );
}

/// Reads query_rope and key_rope into the plan; returns their dimension.
int64_t read_rope(
    const FiaArguments& arguments, const Layout& layout, int64_t num_kv_heads, FiaPlan& plan
) {
  require(
      arguments.query_rope.has_value() == arguments.key_rope.has_value(),
      "query_rope and key_rope must be given together"
  );
  if (!arguments.query_rope) return 0;
  check_like_query(arguments, "key_rope", *arguments.key_rope);
  const PagedCache key =
      read_cache(arguments, "key_rope", *arguments.key_rope, layout, num_kv_heads);
  check_same_blocks("key_rope", key, plan.arguments.k);
  check_like_query(arguments, "query_rope", *arguments.query_rope);
  const TensorView query =
      fia::as_bsnd("query_rope", *arguments.query_rope, layout.input, arguments.num_heads);
  require(
      std::equal(query.shape.begin(), query.shape.begin() + 3, plan.query.shape.begin()) &&
          query.shape[3] == key.head_dim,
      "query_rope must have the tokens and heads of query and the ", key.head_dim,
      " dimensions of key_rope, got shape ", ShapeOf{*arguments.query_rope}
  );
  plan.query_rope = query;
  plan.arguments.k_rope = key;
  return key.head_dim;
}

/// Reads the tensors into the plan; returns the shape of the attention.
AttentionShape read_tensors(const FiaArguments& arguments, const Layout& layout, FiaPlan& plan) {
  const int64_t num_heads = arguments.num_heads;
  const int64_t num_kv_heads =
      arguments.num_key_value_heads == 0 ? num_heads : arguments.num_key_value_heads;
  require(
      num_heads >= 1 && num_kv_heads >= 1 && num_heads % num_kv_heads == 0,
      "num_heads must be a positive multiple of num_key_value_heads, got ", num_heads, " and ",
      num_kv_heads
  );
  require(
      !arguments.block_table || (arguments.block_size >= 1 && arguments.block_size <= INT32_MAX),
      "block_size must be in [1, ", INT32_MAX, "] with block_table, got ", arguments.block_size
  );
  element_type(kFunction, "query", arguments.query.dtype);
  fia::check_antiquant(arguments, layout);
  plan.query = fia::as_bsnd("query", arguments.query, layout.input, num_heads);
  const PagedCache key = read_cache(arguments, "key", arguments.key, layout, num_kv_heads);
  const PagedCache value = read_cache(arguments, "value", arguments.value, layout, num_kv_heads);
  require(
      key.head_dim == plan.query.shape[3], "key must have the head dimension of query, ",
      plan.query.shape[3], ", got ", key.head_dim
  );
  check_same_blocks("value", value, key);
  plan.arguments.k = key;
  plan.arguments.v = value;
  const int64_t rope_dim = read_rope(arguments, layout, num_kv_heads, plan);
  const auto checked_dim = [](const char* name, int64_t dim) {
    return static_cast<int32_t>(check_head_dim(kFunction, name, dim));
  };
  // Pages without rows are never read, but a plan needs a page_size of at least 1.
  for (PagedCache* cache : {&plan.arguments.k, &plan.arguments.v}) {
    cache->page_size = std::max<int64_t>(cache->page_size, 1);
  }
  if (plan.arguments.k_rope) plan.arguments.k_rope->page_size = plan.arguments.k.page_size;
  return {
      .num_heads = narrow_to_int32(num_heads, "npu_fused_infer_attention_score: num_heads"),
      .num_kv_heads =
          narrow_to_int32(num_kv_heads, "npu_fused_infer_attention_score: num_key_value_heads"),
      .head_dim = checked_dim("the head dimension of key", key.head_dim + rope_dim),
      .v_head_dim = checked_dim("the head dimension of value", value.head_dim),
  };
}

}  // namespace

FiaPlan plan_fia(const FiaArguments& arguments) {
  const Layout layout = fia::parse_layout(arguments.input_layout);
  FiaPlan plan{
      .out_axes = std::string(layout.output), .lse_axes = layout.packed() ? "TND" : "BNSD"
  };
  const AttentionShape shape = read_tensors(arguments, layout, plan);
  plan.arguments.function = kFunction;
  plan.arguments.scale = arguments.scale;
  plan.out_shape = shape_of(plan.out_axes, plan.query, shape.v_head_dim);
  plan.lse_shape = {1};
  if (arguments.softmax_lse_flag) plan.lse_shape = shape_of(plan.lse_axes, plan.query, 1);
  require(
      arguments.inner_precise >= 0 && arguments.inner_precise <= 3,
      "inner_precise must be in [0, 3], got ", arguments.inner_precise
  );
  const bool masked = fia::check_mask(arguments, layout);
  if (plan.query.num_elements() == 0) return plan;

  const PagedCache& key = plan.arguments.k;
  const fia::Sequences sequences = fia::read_sequences(arguments, layout, plan.query, key);
  const PageTable pages = fia::read_pages(arguments, layout, sequences, key);
  const fia::Band band = fia::read_band(arguments);
  std::optional<fia::ReadMask> mask;
  if (masked) mask.emplace(arguments, sequences, plan.query.shape[1]);

  if (key.dtype == DType::int8) {
    plan.antiquant =
        std::make_shared<fia::Antiquant>(arguments, sequences, pages, key, plan.arguments.v);
    plan.expands = !plan.antiquant->set_scales(plan.arguments);
  }

  const bool together = !plan.expands && runs_together(plan);
  const int64_t step = together ? sequences.size() : 1;
  for (int64_t first = 0; first < sequences.size(); first += step) {
    AttentionBatch batch = make_batch(sequences, pages, band, first, first + step);
    batch.shape = shape;
    batch.num_rows = plan.query.shape[1] * (together ? plan.query.shape[0] : 1);
    batch.page_size = key.page_size;
    batch.num_pages = key.num_pages;
    if (plan.expands) use_one_page(batch);
    batch.batch_invariant = true;  // do_cp_attn_fia and two calls of run_fia agree bit for bit
    if (mask) batch.mask = mask->pack(batch.segments, first);
    plan.plans.push_back(plan_attention(kFunction, std::move(batch), /*num_threads=*/0));
  }
  return plan;
}

void run_fia(const FiaPlan& plan, const TensorView& out, const TensorView& lse) {
  const int64_t num_heads = plan.query.shape[2];
  const TensorView out_view = fia::as_bsnd("out", out, plan.out_axes, num_heads);
  std::optional<TensorView> lse_view;
  if (wants_lse(plan)) {
    lse_view = fia::as_bsnd("lse", lse, plan.lse_axes, num_heads);
  } else {
    lse.as<float>()[0] = 0;
  }
  const auto num_runs = static_cast<int64_t>(plan.plans.size());
  const int64_t count = num_runs == 1 ? plan.query.shape[0] : 1;
  for (int64_t run = 0; run < num_runs; ++run) {
    AttentionArguments arguments = plan.arguments;
    arguments.q = fia::rows_of(plan.query, run, count);
    if (plan.query_rope) arguments.q_rope = fia::rows_of(*plan.query_rope, run, count);
    arguments.out = fia::rows_of(out_view, run, count);
    if (lse_view) {
      arguments.lse = fia::rows_of(*lse_view, run, count);
      arguments.lse->rank = 2;
    }
    fia::Antiquant::Expanded expanded;
    if (plan.expands) {
      expanded = plan.antiquant->expand(run);
      arguments.k = expanded.key;
      arguments.v = expanded.value;
    }
    run_attention(plan.plans[run], arguments);
  }
}

}  // namespace cpattn
