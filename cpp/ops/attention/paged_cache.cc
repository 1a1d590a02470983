// SPDX-License-Identifier: Apache-2.0
#include "cpattn/attention/paged_attention.h"
#include "cpattn/base/check.h"
#include "cpattn/base/page_size.h"
#include "ops/base/kernel_table.h"
#include "ops/base/tensor_checks.h"

namespace cpattn {
namespace {

/// Reads [slots, heads, dim].
void read_slots(
    const char* function,
    const char* name,
    KVAxisOrder layout,
    std::optional<int64_t> page_size,
    PagedCache& paged
) {
  const TensorView& cache = paged.tensor;
  check(page_size.has_value(), function, ": page_size is required for a 3-dimensional ", name);
  check(
      layout == KVAxisOrder::nhd, function, ": a 3-dimensional ", name,
      " is [slots, heads, dim]; kv_layout must be NHD"
  );
  check_page_size(function, *page_size);
  check(
      cache.shape[0] % *page_size == 0, function, ": ", name,
      " must have a multiple of page_size (", *page_size, ") slots, got ", cache.shape[0]
  );
  paged.num_pages = cache.shape[0] / *page_size;
  paged.page_size = *page_size;
  paged.num_kv_heads = cache.shape[1];
  // A stride from page to page means nothing with fewer than two pages.
  paged.page_stride = paged.num_pages > 1 ? cache.strides[0] * *page_size : 0;
  paged.row_stride = cache.strides[0];
  paged.head_stride = cache.strides[1];
}

/// Reads a cache of four dimensions, whose pages are one of them.
void read_pages(
    const char* function,
    const char* name,
    KVAxisOrder layout,
    std::optional<int64_t> page_size,
    PagedCache& paged
) {
  const TensorView& cache = paged.tensor;
  const int row_axis = layout == KVAxisOrder::nhd ? 1 : 2;
  const int head_axis = 3 - row_axis;
  paged.num_pages = cache.shape[0];
  paged.page_size = cache.shape[row_axis];
  paged.num_kv_heads = cache.shape[head_axis];
  paged.page_stride = cache.strides[0];
  paged.row_stride = cache.strides[row_axis];
  paged.head_stride = cache.strides[head_axis];
  check(
      !page_size || *page_size == paged.page_size, function, ": page_size ", page_size.value_or(0),
      " does not agree with ", name, ", whose pages hold ", paged.page_size, " tokens (shape ",
      ShapeOf{cache}, ")"
  );
}

/// The element of a tensor with one element.
double number_of(const char* function, const char* name, const TensorView& tensor) {
  if (tensor.dtype == DType::float64) return tensor.as<double>()[0];
  const kernels::ElementType type = element_type(function, name, tensor.dtype);
  float number;
  active_sparse_kernels().rows.widen[type](tensor.data, 1, &number);
  return number;
}

}  // namespace

PagedCache paged_cache(
    const char* function,
    const char* name,
    const TensorView& cache,
    KVAxisOrder layout,
    std::optional<int64_t> page_size
) {
  check(
      cache.rank == 3 || cache.rank == 4, function, ": ", name,
      " must have 3 dimensions [slots, heads, dim] or 4, got shape ", ShapeOf{cache}
  );
  check_tensor(function, name, cache, cache.rank);
  PagedCache paged{
      .data = cache.data,
      .dtype = cache.dtype,
      .head_dim = cache.shape[cache.rank - 1],
      .tensor = cache,
  };
  if (cache.rank == 3) {
    read_slots(function, name, layout, page_size, paged);
  } else {
    read_pages(function, name, layout, page_size, paged);
  }
  return paged;
}

KVScale kv_scale(
    const char* function,
    const char* name,
    const TensorView& scale,
    KVAxisOrder layout,
    int64_t page_size,
    int64_t num_kv_heads
) {
  KVScale result;
  if (scale.num_elements() == 1 && scale.rank <= 1) {
    result.tensor = number_of(function, name, scale);
    return result;
  }
  check(
      scale.rank >= 1 && scale.rank <= 3, function, ": ", name, " must be one number, ",
      "[num_kv_heads] or one for each token and head in the pages of the cache, got shape ",
      ShapeOf{scale}
  );
  if (scale.rank == 1) {
    check_dtype(function, name, scale.dtype, DType::float32);
    check_rows(function, name, scale, {num_kv_heads});
    result.heads = scale;
    return result;
  }
  element_type(function, name, scale.dtype);
  // Scales are a cache whose heads have one dimension.
  TensorView cache = scale;
  cache.shape[cache.rank] = 1;
  cache.strides[cache.rank++] = 1;
  check(
      cache.rank == 4 || layout == KVAxisOrder::nhd, function, ": ", name, " must be [num_pages, ",
      "num_kv_heads, page_size] in the layout HND, got shape ", ShapeOf{scale}
  );
  result.tokens = paged_cache(function, name, cache, layout, page_size);
  return result;
}

}  // namespace cpattn
