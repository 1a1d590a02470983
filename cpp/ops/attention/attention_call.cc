// SPDX-License-Identifier: Apache-2.0
#include "cpattn/attention/attention_call.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <utility>

#include "cpattn/base/check.h"

namespace cpattn {

std::optional<DType> parse_kv_dtype(
    const char* function, const std::optional<std::string_view>& kv_dtype
) {
  if (!kv_dtype) return std::nullopt;
  for (DType dtype : {DType::float8_e4m3fn, DType::float8_e5m2, DType::int8}) {
    if (*kv_dtype == dtype_name(dtype)) return dtype;
  }
  throw std::invalid_argument(concat(
      function, ": kv_dtype must be 'float8_e4m3fn', 'float8_e5m2' or 'int8', got '", *kv_dtype, "'"
  ));
}

TensorView as_codes(
    const char* function,
    const char* name,
    const TensorView& cache,
    const std::optional<DType>& kv_dtype
) {
  TensorView codes = cache;
  if (kv_dtype) {
    check(
        cache.dtype == DType::uint8 || cache.dtype == *kv_dtype, function, ": ", name, " must be ",
        *kv_dtype, ", as kv_dtype says, or its bytes in uint8, got ", cache.dtype
    );
    codes.dtype = *kv_dtype;
  }
  check(
      codes.dtype != DType::uint8, function, ": ", name,
      " of uint8 needs kv_dtype, which says what its bytes are: 'float8_e4m3fn', 'float8_e5m2' or ",
      "'int8'"
  );
  return codes;
}

double default_scale(const char* function, int64_t head_dim) {
  check(
      head_dim <= 256, function, ": scale must be given for head_dim > 256, got head_dim ",
      head_dim, " (absorbed MLA scales by the unabsorbed width)"
  );
  // The check of shapes refuses dimensions below 1.
  return 1 / std::sqrt(static_cast<double>(std::max<int64_t>(head_dim, 1)));
}

void refuse_missing_scale(const char* function, const char* name) {
  throw std::invalid_argument(concat(
      function, ": ", name,
      " must be given for a cache of int8, whose codes are integers up to 127, got None"
  ));
}

KVScale kv_scale(
    const char* function,
    const char* name,
    const GivenScale& scale,
    KVAxisOrder layout,
    int64_t page_size,
    int64_t num_kv_heads
) {
  if (!scale.tensor) return {.tensor = scale.number.value_or(1)};
  return kv_scale(function, name, *scale.tensor, layout, page_size, num_kv_heads);
}

AttentionArguments layer_arguments(const char* function, const LayerCall& call) {
  check_tensor(function, "q", call.q, 3);
  check(
      call.q_rope.has_value() == call.k_rope.has_value(), function,
      ": q_rope and k_rope must be given together"
  );
  const std::optional<DType> codes = parse_kv_dtype(function, call.kv_dtype);
  const auto paged = [&](const char* name, const TensorView& cache) {
    const TensorView numbers = as_codes(function, name, cache, codes);
    return paged_cache(function, name, numbers, call.kv_layout, call.page_size);
  };
  AttentionArguments arguments{
      .function = function,
      .q = call.q,
      .k = paged("k_cache", call.k_cache),
      .v = paged("v_cache", call.v_cache),
      .softcap = call.softcap,
      .bias = call.bias,
      .sinks = call.sinks,
      .out = call.out,
      .lse = call.lse,
  };
  const PagedCache& k = arguments.k;
  if (k.dtype == DType::int8 && !call.k_scale.is_given()) refuse_missing_scale(function, "k_scale");
  if (k.dtype == DType::int8 && !call.v_scale.is_given()) refuse_missing_scale(function, "v_scale");
  const auto scale_of = [&](const char* name, const GivenScale& scale, const PagedCache& cache) {
    return kv_scale(function, name, scale, call.kv_layout, cache.page_size, cache.num_kv_heads);
  };
  arguments.k_scale = scale_of("k_scale", call.k_scale, k);
  arguments.v_scale = scale_of("v_scale", call.v_scale, arguments.v);
  int64_t head_dim = call.q.dim(2);
  if (call.k_rope) {
    check_tensor(function, "q_rope", *call.q_rope, 3);
    arguments.q_rope = call.q_rope;
    arguments.k_rope = paged("k_rope", *call.k_rope);
    head_dim += call.q_rope->dim(2);
  }
  arguments.scale = call.scale ? *call.scale : default_scale(function, head_dim);
  return arguments;
}

std::optional<CsrPages> csr_pages(
    const char* function,
    bool has_kv_lens,
    std::optional<std::vector<int64_t>> kv_indptr,
    std::optional<std::vector<int64_t>> kv_indices,
    std::optional<std::vector<int64_t>> last_page_len
) {
  if (!kv_indptr && !kv_indices && !last_page_len) return std::nullopt;
  check(
      kv_indptr && kv_indices && last_page_len, function,
      ": kv_indptr, kv_indices and last_page_len must be given together"
  );
  check(!has_kv_lens, function, ": kv_lens must not be given beside last_page_len");
  return CsrPages{std::move(*kv_indptr), std::move(*kv_indices), std::move(*last_page_len)};
}

void paged_attention(
    const char* function, SequenceBatch batch, const AttentionArguments& arguments, int num_threads
) {
  batch.shape = attention_shape(arguments);
  batch.page_size = arguments.k.page_size;
  batch.num_pages = std::min(arguments.k.num_pages, arguments.v.num_pages);
  if (arguments.k_rope) batch.num_pages = std::min(batch.num_pages, arguments.k_rope->num_pages);
  batch.num_rows = arguments.q.dim(0);
  run_attention(plan_sequences(function, batch, num_threads), arguments);
}

void run_attention(const char* function, const AttentionPlan& plan, LayerCall call) {
  call.page_size = plan.batch.page_size;
  if (!call.scale) call.scale = default_scale(function, plan.batch.shape.head_dim);
  run_attention(plan, layer_arguments(function, call));
}

}  // namespace cpattn
