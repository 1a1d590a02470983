// SPDX-License-Identifier: Apache-2.0
#include "cpattn/sparse/sparse_mla.h"

#include <type_traits>

#include "cpattn/attention/attention_plan.h"
#include "cpattn/base/check.h"
#include "cpattn/base/index_table.h"
#include "cpattn/base/parallel.h"
#include "ops/attention/selected_attention.h"
#include "ops/base/kernel_table.h"
#include "ops/base/tensor_checks.h"

namespace cpattn {
namespace {

bool is_byte(DType dtype) { return dtype == DType::uint8 || dtype == DType::float8_e4m3fn; }

/// Reads kv and its storage format into `attention`; returns the number of its rows.
int64_t read_kv(const TensorView& kv, SelectedAttention& attention) {
  const char* function = attention.function;
  const CheckFor require{function};
  const TensorView& q = attention.q;
  if (!is_byte(kv.dtype)) {
    check_dtype(function, "kv", kv.dtype, q.dtype);
    const FlatRows rows = flat_rows(function, "kv", kv, q.shape[3]);
    attention.k = attention.v = {kv.data, rows.stride, rows.stride};
    return rows.count;
  }
  check_dtype(function, "with FP8 rows q", q.dtype, DType::bfloat16);
  require(
      q.shape[3] == kernels::kKvDim, "with FP8 rows q must have head dimension ", kernels::kKvDim,
      ", got ", q.shape[3]
  );
  const FlatRows rows = flat_rows(function, "kv", kv, kernels::kKvRowBytes);
  require(
      rows.stride % 2 == 0, "FP8 rows must be an even number of bytes apart, got ", rows.stride
  );
  attention.k = {kv.data, rows.stride / 2, rows.stride / 2};
  attention.expand = active_sparse_kernels().rows.expand_kv_row;
  attention.stored_bytes = kernels::kKvRowBytes;
  return rows.count;
}

/// Checks indices and returns them as a table [num_tokens, topk].
IndexTable read_indices(const char* function, const TensorView& indices, int64_t num_tokens) {
  const CheckFor require{function};
  const int last = indices.rank - 1;
  require(
      (indices.rank == 2 || (indices.rank == 3 && indices.shape[1] == 1)) &&
          indices.shape[0] == num_tokens,
      "indices must have shape [", num_tokens, ", 1, topk] or [", num_tokens, ", topk], got ",
      ShapeOf{indices}
  );
  require(
      indices.dtype == DType::int32 || indices.dtype == DType::int64,
      "indices must be int32 or int64, got ", indices.dtype
  );
  check_tensor(function, "indices", indices, indices.rank);
  return {
      indices.data, indices.dtype == DType::int64, num_tokens, indices.shape[last],
      indices.strides[0]
  };
}

void check_lengths(
    const char* function, const std::vector<int64_t>& lengths, int64_t num_tokens, int64_t topk
) {
  const CheckFor require{function};
  const auto size = static_cast<int64_t>(lengths.size());
  require(
      size == num_tokens, "topk_length must have one entry per token (", num_tokens, "), got ", size
  );
  for (int64_t i = 0; i < size; ++i) {
    require(
        lengths[i] >= 0 && lengths[i] <= topk, "topk_length must be in [0, topk = ", topk,
        "], got ", lengths[i], " at index ", i
    );
  }
}

void check_results(const SparseMlaArguments& arguments) {
  const char* function = arguments.function;
  const int64_t num_tokens = arguments.q.shape[0], num_heads = arguments.q.shape[1];
  check_dtype(function, "out", arguments.out.dtype, arguments.q.dtype);
  check_rows(function, "out", arguments.out, {num_tokens, num_heads, arguments.v_head_dim});
  const auto check_apart = [&](const char* name, const TensorView& out) {
    check_no_overlap(function, name, out, "q", arguments.q);
    check_no_overlap(function, name, out, "kv", arguments.kv);
    check_no_overlap(function, name, out, "indices", arguments.indices);
    if (arguments.attn_sink) {
      check_no_overlap(function, name, out, "attn_sink", *arguments.attn_sink);
    }
  };
  check_apart("out", arguments.out);
  const auto check_scalars = [&](const char* name, const TensorView& result) {
    check_dtype(function, name, result.dtype, DType::float32);
    check_shape(function, name, result, {num_tokens, num_heads});
    check(result.is_contiguous(), function, ": ", name, " must be contiguous");
    check_apart(name, result);
    check_no_overlap(function, name, result, "out", arguments.out);
  };
  check_scalars("max_logits", arguments.max_logits);
  check_scalars("lse", arguments.lse);
  check_no_overlap(function, "lse", arguments.lse, "max_logits", arguments.max_logits);
}

/// Writes those of n indices that are in [0, num_rows); returns their number.
template <class Index>
int64_t valid_rows(const void* indices, int64_t n, int64_t num_rows, int32_t* rows) {
  const auto* index = static_cast<const Index*>(indices);
  const auto limit = static_cast<std::make_unsigned_t<Index>>(num_rows);
  int64_t count = 0;
  for (int64_t i = 0; i < n; ++i) {
    // Read once: a number that another thread writes meanwhile must not pass for the checked one.
    const Index value = __atomic_load_n(index + i, __ATOMIC_RELAXED);
    rows[count] = static_cast<int32_t>(value);  // overwritten by the next index unless it counts
    count += static_cast<std::make_unsigned_t<Index>>(value) < limit ? 1 : 0;
  }
  return count;
}

}  // namespace

void flash_mla_sparse_fwd(const SparseMlaArguments& arguments) {
  const char* function = arguments.function;
  const CheckFor require{function};
  const TensorView& q = arguments.q;
  element_type(function, "q", q.dtype);
  check_tensor(function, "q", q, 3);
  check_head_dim(function, "head_dim", q.shape[2]);
  check_head_dim(function, "d_v", arguments.v_head_dim);
  require(
      arguments.v_head_dim <= q.shape[2], "d_v must be at most head_dim (", q.shape[2], "), got ",
      arguments.v_head_dim
  );
  check_scale(function, "sm_scale", arguments.scale);
  SelectedAttention attention{.function = function, .q = as_batch(q)};
  const int64_t num_rows =
      narrow_to_int32(read_kv(arguments.kv, attention), concat(function, ": rows of kv").c_str());
  const IndexTable indices = read_indices(function, arguments.indices, q.shape[0]);
  if (arguments.topk_length)
    check_lengths(function, *arguments.topk_length, q.shape[0], indices.columns);
  if (arguments.attn_sink) {
    check_dtype(function, "attn_sink", arguments.attn_sink->dtype, DType::float32);
    check_rows(function, "attn_sink", *arguments.attn_sink, {q.shape[1]});
    attention.sinks = arguments.attn_sink->as<float>();
  }
  check_results(arguments);
  attention.v_head_dim = arguments.v_head_dim;
  attention.max_keys = indices.columns;
  attention.scale = arguments.scale;
  attention.out = as_batch(arguments.out);
  attention.lse = arguments.lse.as<float>();
  attention.max_logits = arguments.max_logits.as<float>();

  const auto select = [&](int64_t token, int32_t* rows) {
    const int64_t n = arguments.topk_length ? (*arguments.topk_length)[token] : indices.columns;
    const int64_t offset = token * indices.row_stride;
    if (indices.is_int64) {
      return valid_rows<int64_t>(
          static_cast<const int64_t*>(indices.data) + offset, n, num_rows, rows
      );
    }
    return valid_rows<int32_t>(
        static_cast<const int32_t*>(indices.data) + offset, n, num_rows, rows
    );
  };
  attend_selected(
      attention, select, arguments.num_threads > 0 ? arguments.num_threads : default_num_threads()
  );
}

}  // namespace cpattn
