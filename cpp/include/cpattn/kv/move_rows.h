// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>

#include "cpattn/base/tensor_view.h"

namespace cpattn {

/// Moves rows within each of several caches, all at once: afterwards slot targets[i] has what slot
/// sources[i] had before, whatever the order of the moves. A source may
/// have several targets; a pair with a -1 is skipped. Caches are [num_pages, num_heads, page_size,
/// dim] of any dtype and strides with a contiguous last dimension; slot s is offset s % page_size
/// of page s / page_size. Scratch holds the slots, and one row of each head at work.
///
/// Throws std::invalid_argument, which names `function`, for lists of different lengths, slots that
/// a cache does not have, a repeated target and caches that may share rows. Nothing is written
/// then.
void move_page_rows(
    const char* function,
    std::span<const int64_t> sources,
    std::span<const int64_t> targets,
    std::span<const TensorView> caches
);

}  // namespace cpattn
