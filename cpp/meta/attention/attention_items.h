// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "cpattn/attention/attention_plan.h"

namespace cpattn {

/// Packing K and V costs about as much as this many rows of arithmetic.
constexpr int64_t kPackingRows = 12;

/// Keys [begin, end); none if end <= begin.
struct VisibleKeys {
  int64_t begin, end;
};

/// The keys that a token of a segment sees, but for a mask. Both bounds ascend with the token.
VisibleKeys visible_keys(
    const AttentionBatch& batch, const AttentionSegment& segment, int64_t token
);

/// Counts of keys that a mask and the window let tokens see.
struct ShownKeys {
  int64_t pairs = 0;  // (token, key) pairs
  int64_t keys = 0;   // keys that any of the tokens sees, in whole words of the mask
};

/// Counts for tokens [first, first + count) of a segment of a batch with a mask, and keys
/// [kv_begin, kv_end).
ShownKeys shown_by_mask(
    const AttentionBatch& batch,
    const AttentionSegment& segment,
    int64_t first,
    int64_t count,
    int64_t kv_begin,
    int64_t kv_end
);

/// Whether a segment has so few tokens that it is divided along its keys.
bool is_short(const AttentionBatch& batch, const AttentionSegment& segment);

/// The length of the parts of the short segments of a batch.
int64_t part_keys(const AttentionBatch& batch);

/// Whether a segment has so few rows for each KV head that most of the time goes to reading keys
/// and values.
bool is_read_bound(const AttentionBatch& batch, const AttentionSegment& segment);

/// Whether kernels may read the keys and values of a segment in place: it is short and read-bound.
bool may_read_in_place(const AttentionBatch& batch, const AttentionSegment& segment);

/// Whether softmax weights of a segment stay unrounded: see AttentionPlan.
bool is_precise(const AttentionBatch& batch, const AttentionSegment& segment);

/// The most KV heads that an item of a read-bound segment takes together.
int64_t heads_per_run(const AttentionBatch& batch, int64_t part_keys);

/// Appends the items of a read-bound segment. plan.part_keys has been set.
void append_read_bound_items(
    const AttentionBatch& batch, int32_t segment, int64_t heads_per_run, AttentionPlan& plan
);

/// Appends an item with its keys and cost; the item of a short segment becomes one part or more.
/// plan.part_keys has been set.
void append_parts(const AttentionBatch& batch, AttentionItem item, AttentionPlan& plan);

}  // namespace cpattn
