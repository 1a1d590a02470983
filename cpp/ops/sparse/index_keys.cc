// SPDX-License-Identifier: Apache-2.0
#include "ops/sparse/index_keys.h"

#include "cpattn/base/check.h"
#include "cpattn/base/page_size.h"

namespace cpattn {
namespace {

constexpr char kCache[] = "index_k_cache";
constexpr int64_t kScaleBytes = sizeof(float);

void check_whole_pages(const char* function, int64_t slots, int64_t page_size) {
  check(
      slots % page_size == 0, function, ": ", kCache,
      " must hold a multiple of page_size = ", page_size, " rows, got ", slots
  );
}

/// Reads a cache of bytes, each page of which holds its rows, then their scales.
IndexKeys packed_keys(
    const char* function, const TensorView& cache, int64_t page_size, int64_t dim
) {
  const int64_t page_bytes = page_size * (dim + kScaleBytes);
  TensorView page = cache;
  page.rank = cache.rank - 1;
  for (int axis = 0; axis < page.rank; ++axis) {
    page.shape[axis] = cache.shape[axis + 1];
    page.strides[axis] = cache.strides[axis + 1];
  }
  check(
      cache.rank >= 2 && page.num_elements() == page_bytes && page.is_contiguous(), function, ": ",
      kCache, " of uint8 must be [pages, page_size * (head_dim + 4)] with contiguous pages of ",
      page_bytes, " bytes, got shape ", ShapeOf{cache}
  );
  const auto* data = cache.as<const uint8_t>();
  check(
      reinterpret_cast<uintptr_t>(data + page_size * dim) % alignof(float) == 0 &&
          cache.strides[0] % kScaleBytes == 0,
      function, ": ", kCache, " must have its scales at multiples of 4 bytes, got head_dim ", dim,
      ", page_size ", page_size, " and pages ", cache.strides[0], " bytes apart"
  );
  return {
      .data = data,
      .dtype = DType::float8_e4m3fn,
      .dim = dim,
      .num_pages = cache.shape[0],
      .page_size = page_size,
      .page_bytes = cache.strides[0],
      .row_bytes = dim,
      .scales = data + page_size * dim,
      .scale_page_bytes = cache.strides[0],
      .scale_row_bytes = kScaleBytes,
  };
}

/// The strides from page to page and from row to row, in elements. Slots are counted along
/// dimension 0, pages and rows along dimensions 0 and 1.
struct RowStrides {
  int64_t page, row;
  RowStrides(const TensorView& rows, bool slots, int64_t page_size)
      : page(slots ? rows.strides[0] * page_size : rows.strides[0]),
        row(slots ? rows.strides[0] : rows.strides[1]) {}
};

void add_scales(
    const char* function,
    const TensorView& cache,
    const TensorView& k_scale,
    bool slots,
    const char* name,
    IndexKeys& keys
) {
  TensorView expected = cache;
  --expected.rank;
  bool same = k_scale.dtype == DType::float32 && k_scale.rank == expected.rank;
  for (int axis = 0; same && axis < expected.rank; ++axis) {
    same = k_scale.shape[axis] == expected.shape[axis];
  }
  check(
      same, function, ": ", name, " must be float32 ", ShapeOf{expected}, " like the rows of ",
      kCache, ", got ", k_scale.dtype, ' ', ShapeOf{k_scale}
  );
  const RowStrides strides(k_scale, slots, keys.page_size);
  keys.scales = k_scale.data;
  keys.scale_page_bytes = strides.page * kScaleBytes;
  keys.scale_row_bytes = strides.row * kScaleBytes;
}

/// Whether a cache that is not packed counts slots, not pages. Throws for any other form.
bool counts_slots(const char* function, const TensorView& cache, int64_t page_size, int64_t dim) {
  check(
      cache.dtype == DType::bfloat16 || cache.dtype == DType::float32 ||
          cache.dtype == DType::float8_e4m3fn || cache.dtype == DType::int8,
      function, ": ", kCache, " must be bfloat16, float32, float8_e4m3fn, int8 or uint8, got ",
      cache.dtype
  );
  const bool slots = cache.rank == 3 && cache.shape[1] == 1;
  check(
      slots || (cache.rank == 3 && cache.shape[1] == page_size) ||
          (cache.rank == 4 && cache.shape[1] == page_size && cache.shape[2] == 1),
      function, ": ", kCache,
      " must be [pages, page_size, head_dim], [pages, page_size, 1, head_dim] or [slots, 1, "
      "head_dim] with page_size ",
      page_size, ", got shape ", ShapeOf{cache}
  );
  check_tensor(function, kCache, cache, cache.rank);
  check(
      cache.shape[cache.rank - 1] == dim, function, ": ", kCache, " must have the head_dim of q, ",
      dim, ", got shape ", ShapeOf{cache}
  );
  if (slots) check_whole_pages(function, cache.shape[0], page_size);
  return slots;
}

}  // namespace

IndexKeys view_index_keys(
    const char* function,
    const TensorView& index_k_cache,
    const std::optional<TensorView>& k_scale,
    int64_t page_size,
    int64_t dim,
    const char* k_scale_name
) {
  const TensorView& cache = index_k_cache;
  check_page_size(function, page_size);
  if (cache.dtype == DType::uint8) {
    check(
        !k_scale, function, ": ", k_scale_name, " must not be given with ", kCache,
        " of uint8, which has it"
    );
    return packed_keys(function, cache, page_size, dim);
  }
  const bool slots = counts_slots(function, cache, page_size, dim);
  const int64_t bytes = element_size(cache.dtype);
  const RowStrides strides(cache, slots, page_size);
  IndexKeys keys{
      .data = cache.data,
      .dtype = cache.dtype,
      .dim = dim,
      .num_pages = slots ? cache.shape[0] / page_size : cache.shape[0],
      .page_size = page_size,
      .page_bytes = strides.page * bytes,
      .row_bytes = strides.row * bytes,
  };
  if (k_scale) add_scales(function, cache, *k_scale, slots, k_scale_name, keys);
  return keys;
}

}  // namespace cpattn
