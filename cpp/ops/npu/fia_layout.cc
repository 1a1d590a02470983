// SPDX-License-Identifier: Apache-2.0
#include "ops/npu/fia_layout.h"

#include <algorithm>
#include <string>

namespace cpattn::fia {
namespace {

constexpr std::string_view kLayouts[] = {
    "BSH",       "BSND",      "BNSD", "BNSD_BSND", "BSH_NBSD",
    "BSND_NBSD", "BNSD_NBSD", "TND",  "TND_NTD",   "NTD_TND",
};

int64_t head_dim_of(const char* name, int64_t width, int64_t num_heads) {
  require(
      width % num_heads == 0, name, " must have a last dimension that its ", num_heads,
      " heads divide, got ", width
  );
  return width / num_heads;
}

}  // namespace

Layout parse_layout(std::string_view name) {
  std::string known;
  for (const std::string_view layout : kLayouts)
    known.append(known.empty() ? "" : ", ").append(layout);
  require(
      std::find(std::begin(kLayouts), std::end(kLayouts), name) != std::end(kLayouts),
      "input_layout must be one of ", known, ", got '", name, "'"
  );
  const auto bar = name.find('_');
  if (bar == std::string_view::npos) return {name, name};
  return {name.substr(0, bar), name.substr(bar + 1)};
}

TensorView as_bsnd(
    const char* name, const TensorView& tensor, std::string_view axes, int64_t num_heads
) {
  check_tensor(kFunction, name, tensor, static_cast<int>(axes.size()));
  TensorView view = tensor;
  view.rank = 4;
  view.shape = {1};
  view.strides = {};
  for (int axis = 0; axis < tensor.rank; ++axis) {
    if (axes[axis] == 'H') {
      const int64_t head_dim = head_dim_of(name, tensor.shape[axis], num_heads);
      view.shape[2] = num_heads;
      view.shape[3] = head_dim;
      view.strides[2] = head_dim;
      view.strides[3] = 1;
      continue;
    }
    const auto target = std::string_view("BSND").find(axes[axis] == 'T' ? 'S' : axes[axis]);
    view.shape[target] = tensor.shape[axis];
    view.strides[target] = tensor.strides[axis];
  }
  require(
      view.shape[2] == num_heads, name, " (", axes, ") must have ", num_heads, " heads, got ",
      view.shape[2], " in shape ", ShapeOf{tensor}
  );
  return view;
}

bool has_uniform_rows(const TensorView& bsnd) {
  return bsnd.shape[0] <= 1 || bsnd.shape[1] <= 1 ||
         bsnd.strides[0] == bsnd.shape[1] * bsnd.strides[1];
}

TensorView rows_of(const TensorView& bsnd, int64_t first, int64_t count) {
  TensorView rows = bsnd;
  rows.data = bsnd.as<char>() + first * bsnd.strides[0] * element_size(bsnd.dtype);
  rows.rank = 3;
  rows.shape = {count * bsnd.shape[1], bsnd.shape[2], bsnd.shape[3]};
  rows.strides = {bsnd.strides[bsnd.shape[1] == 1 ? 0 : 1], bsnd.strides[2], bsnd.strides[3]};
  return rows;
}

PagedCache paged_blocks(
    const char* name, const TensorView& cache, int64_t num_heads, int64_t block_size, bool by_head
) {
  require(
      cache.rank == 3 || (cache.rank == 4 && by_head), name,
      " must be [blocks, block_size, H] when paged",
      by_head ? " or [blocks, N, block_size, D]" : " under this layout", ", got shape ",
      ShapeOf{cache}
  );
  check_tensor(kFunction, name, cache, cache.rank);
  const int row_axis = cache.rank - 2;
  require(
      cache.shape[row_axis] == block_size && (cache.rank == 3 || cache.shape[1] == num_heads), name,
      " must have blocks of block_size ", block_size, " and ", num_heads, " heads, got shape ",
      ShapeOf{cache}
  );
  const int64_t head_dim =
      cache.rank == 4 ? cache.shape[3] : head_dim_of(name, cache.shape[2], num_heads);
  return {
      .data = cache.data,
      .dtype = cache.dtype,
      .num_pages = cache.shape[0],
      .page_size = block_size,
      .num_kv_heads = num_heads,
      .head_dim = head_dim,
      .page_stride = cache.strides[0],
      .row_stride = cache.strides[row_axis],
      .head_stride = cache.rank == 4 ? cache.strides[1] : head_dim,
      .tensor = cache,
  };
}

PagedCache contiguous_blocks(
    const char* name, const TensorView& tensor, const Layout& layout, int64_t num_heads
) {
  const TensorView view = as_bsnd(name, tensor, layout.input, num_heads);
  const bool packed = layout.packed();
  return {
      .data = view.data,
      .dtype = view.dtype,
      .num_pages = packed ? view.shape[1] : view.shape[0],
      .page_size = view.shape[1],
      .num_kv_heads = num_heads,
      .head_dim = view.shape[3],
      .page_stride = packed ? view.strides[1] : view.strides[0],
      .row_stride = view.strides[1],
      .head_stride = view.strides[2],
      .tensor = tensor,
  };
}

}  // namespace cpattn::fia
