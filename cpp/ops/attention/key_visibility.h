// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>

#include "cpattn/attention/attention_plan.h"
#include "cpattn/attention/key_visibility.h"

namespace cpattn {

/// Sets left, right and mask of a batch whose segments are set. A segment has tokens of
/// sequences[segment.table_row]; their positions give their rows of the mask. Throws
/// std::invalid_argument, naming `function`, for options that exclude each other, and a mask of
/// another dtype or size.
void set_visibility(
    const char* function,
    const KeyVisibility& visibility,
    std::span<const SequenceLens> sequences,
    AttentionBatch& batch
);

}  // namespace cpattn
