// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cpattn/base/tensor_view.h"

namespace cpattn {

/// Merges two partial attention results over disjoint key sets, in place into
/// the first:
///   out_a <- (w_a out_a + w_b out_b) / (w_a + w_b),   w = exp(lse)
///   lse_a <- log(w_a + w_b)
///
///   out_a, out_b  [num_tokens, num_heads, head_dim] of one dtype (float32,
///                 float16 or bfloat16), last dimension contiguous
///   lse_a, lse_b  float32 [num_tokens, num_heads], natural logarithm
///
/// lse = -inf marks a row that saw no keys: it has weight zero whatever its
/// numbers are, NaN included. If both rows are empty the result is zeros with
/// lse = -inf. lse = +inf (another library's mark of an empty row) is refused.
///
/// Runs on default_num_threads() threads. If the call is interrupted, some of the rows are merged,
/// each of them wholly, and the others are as they were. Throws std::invalid_argument before
/// anything is written.
void merge_state(
    const TensorView& out_a,
    const TensorView& lse_a,
    const TensorView& out_b,
    const TensorView& lse_b
);

}  // namespace cpattn
