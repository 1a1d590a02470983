// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <span>

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
/// lse = -inf marks a row that saw no keys: its weight is zero whatever its numbers are, NaN
/// included. If both rows are empty the result is zeros with lse = -inf. lse = +inf (another
/// library's mark of an empty row) is refused.
///
/// Runs on default_num_threads() threads. After an interrupt each row is either merged or as it
/// was. Throws std::invalid_argument before anything is written.
void merge_state(
    const TensorView& out_a,
    const TensorView& lse_a,
    const TensorView& out_b,
    const TensorView& lse_b
);

/// Merges any number of partial results, at least one, into `out` and `lse`. The bits are those of
/// merge_state() over the first two parts, then over that result and the third, and so on, in
/// float32; 16-bit results are rounded once, at the end. Empty rows, threads, interrupts and errors
/// are those of merge_state().
///
///   outs   each [num_tokens, num_heads, head_dim], all of one dtype
///   lses   as many, each float32 [num_tokens, num_heads]
///   sinks  float32 [num_heads], or nothing: the logit of a key without value, which takes its
///          weight after the merge, all of it for +inf; lse leaves it out
///   out    like one of outs: outs[0] itself, or memory that no argument shares
///   lse    likewise
///
/// Scratch of a thread grows only with the number of parts.
void merge_states(
    std::span<const TensorView> outs,
    std::span<const TensorView> lses,
    const std::optional<TensorView>& sinks,
    const TensorView& out,
    const TensorView& lse
);

/// Merges parts in one tensor: outs [num_tokens, num_parts, num_heads, head_dim], lses
/// [num_tokens, num_parts, num_heads].
void merge_states(
    const TensorView& outs,
    const TensorView& lses,
    const std::optional<TensorView>& sinks,
    const TensorView& out,
    const TensorView& lse
);

}  // namespace cpattn
