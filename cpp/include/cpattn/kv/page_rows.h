// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>

#include "cpattn/base/kv_axis_order.h"
#include "cpattn/base/tensor_view.h"

namespace cpattn {

/// Returns pages of four dimensions as [num_pages, num_heads, page_size, dim]. Three dimensions are
/// slots without pages and become pages of one token.
TensorView heads_first(TensorView pages, KVAxisOrder order);

/// Rows of one kind on their way into pages outside a KVBuffer. The last dimension of rows and
/// pages is contiguous, other strides are free.
struct PageRows {
  const char* name;  // of the arguments, for messages
  const char* pages_name;
  const char* scale_name = "scale";
  TensorView rows;   // [num_rows, num_heads, dim]
  TensorView pages;  // [num_pages, num_heads, page_size, dim]
  double scale = 1;  // divides rows of another dtype
};

/// Writes rows of all parts to slots: row i to slot slots[i] % page_size of page slots[i] /
/// page_size; -1 skips the row. If rows share a slot the last one counts, for any number of
/// threads; the call may set `slots` of the others to -1. Parts have equal page sizes and page
/// counts.
///
/// Rows are copied, or become another dtype, as in write_kv_rows().
///
/// Throws std::invalid_argument, which names `function`, for slots that are not in the pages,
/// shapes that do not fit, other dtypes, a scale that is not a positive number, and rows that
/// overlap pages. Nothing is written then.
void write_page_rows(
    const char* function, std::span<int64_t> slots, std::span<const PageRows> parts
);

}  // namespace cpattn
