// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>

#include "cpattn/base/kv_axis_order.h"
#include "cpattn/base/tensor_view.h"

namespace cpattn {

/// Pages of four dimensions as [num_pages, num_heads, page_size, dim]; of three, slots without
/// pages, they become pages of one token.
TensorView heads_first(TensorView pages, KVAxisOrder order);

/// Rows of one kind on their way into pages that somebody else keeps. The last dimension of both
/// is contiguous, other strides are free.
struct PageRows {
  const char* name;  // of the argument, for messages
  TensorView rows;   // [num_rows, num_heads, dim]
  TensorView pages;  // [num_pages, num_heads, page_size, dim]
  double scale = 1;  // what rows of another dtype are divided by
};

/// Writes rows of all parts to slots: row i to slot slots[i] % page_size of page slots[i] /
/// page_size; -1 skips the row. Of rows for one slot the last one counts, whatever the number of
/// threads; `slots` of the others may be set to -1. Parts have pages of one size, and as many.
///
/// Rows are copied, or become another dtype, as in write_kv_rows().
///
/// Throws std::invalid_argument, which names `function`, for slots that are not in the pages,
/// shapes that do not fit, other dtypes, a scale that is not a positive number, and rows that lie
/// where pages do. Nothing is written then.
void write_page_rows(
    const char* function, std::span<int64_t> slots, std::span<const PageRows> parts
);

}  // namespace cpattn
