// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "meta/attention/attention_items.h"

namespace cpattn {
namespace {

/// Neighbouring KV heads are read together until a token has this many elements: in the order
/// NHD they are 2 KB in a row, enough for memory to stream.
constexpr int64_t kRunElements = 1024;
/// Runs that a batch should have. With fewer runs each takes fewer heads, so that more threads have
/// work.
constexpr int64_t kWantedRuns = 16;
/// Runs that a batch should have if segments are not divided, so that only runs are parallel.
constexpr int64_t kWantedWholeRuns = 64;
/// Parts that a batch should have: enough for many threads.
constexpr int64_t kWantedParts = 256;

/// The keys that the tokens of a segment see.
VisibleKeys keys_of(const AttentionBatch& batch, const AttentionSegment& segment) {
  const int64_t begin = visible_keys(batch, segment, 0).begin;
  return {begin, std::max(begin, visible_keys(batch, segment, segment.q_len - 1).end)};
}

}  // namespace

bool is_short(const AttentionBatch& batch, const AttentionSegment& segment) {
  return !batch.batch_invariant && segment.q_len > 0 && segment.q_len <= kMaxDecodeTokens;
}

int64_t part_keys(const AttentionBatch& batch) {
  int64_t keys = 0;
  int64_t rows = 1;
  int64_t granule = kInPlaceGranule;  // shorter parts are not worth their merge
  for (const AttentionSegment& segment : batch.segments) {
    if (!is_short(batch, segment)) continue;
    const VisibleKeys range = keys_of(batch, segment);
    keys += range.end - range.begin;
    rows = std::max(rows, segment.q_len * batch.shape.num_heads);
    if (!may_read_in_place(batch, segment)) granule = kMaxBlockKeys;
  }
  // A split segment, which has more keys than a part, has less than three times as many parts as
  // pay off.
  const int64_t part_bytes =
      rows * (padded_dim(batch.shape.v_head_dim) + kPartialStateFloats) * int64_t{sizeof(float)};
  const int64_t parts = std::clamp<int64_t>(kMaxPartialBytes / part_bytes / 3, 1, kWantedParts);
  const int64_t wanted = (keys + parts - 1) / parts;
  return std::max<int64_t>(1, (wanted + granule - 1) / granule) * granule;
}

bool is_read_bound(const AttentionBatch& batch, const AttentionSegment& segment) {
  const int64_t group = batch.shape.num_heads / batch.shape.num_kv_heads;
  return segment.q_len > 0 && segment.q_len <= read_bound_rows(batch.shape.head_dim) / group;
}

bool may_read_in_place(const AttentionBatch& batch, const AttentionSegment& segment) {
  return is_short(batch, segment) && is_read_bound(batch, segment);
}

bool is_precise(const AttentionBatch& batch, const AttentionSegment& segment) {
  const int64_t rows = segment.q_len * (batch.shape.num_heads / batch.shape.num_kv_heads);
  return batch.precise || (may_read_in_place(batch, segment) && rows <= kPreciseRows);
}

int64_t heads_per_run(const AttentionBatch& batch, int64_t part_keys) {
  int64_t parts = 0;
  for (const AttentionSegment& segment : batch.segments) {
    if (!is_read_bound(batch, segment)) continue;
    const VisibleKeys range = keys_of(batch, segment);
    parts +=
        batch.batch_invariant ? 1 : std::max<int64_t>(1, (range.end - range.begin) / part_keys);
  }
  const int64_t wanted = batch.batch_invariant ? kWantedWholeRuns : kWantedRuns;
  const int64_t most = std::max<int64_t>(1, kRunElements / padded_dim(batch.shape.head_dim));
  return std::clamp<int64_t>(parts * batch.shape.num_kv_heads / wanted, 1, most);
}

void append_read_bound_items(
    const AttentionBatch& batch, int32_t segment, int64_t heads_per_run, AttentionPlan& plan
) {
  const AttentionShape& shape = batch.shape;
  const int64_t group = shape.num_heads / shape.num_kv_heads;
  const int64_t runs = (shape.num_kv_heads + heads_per_run - 1) / heads_per_run;
  for (int64_t run = 0; run < runs; ++run) {
    const int64_t begin = shape.num_kv_heads * run / runs;
    const int64_t end = shape.num_kv_heads * (run + 1) / runs;
    append_parts(
        batch,
        {
            .segment = segment,
            .first_head = static_cast<int32_t>(begin * group),
            .num_heads = static_cast<int32_t>((end - begin) * group),
            .num_tokens = static_cast<int32_t>(batch.segments[segment].q_len),
            .may_read_in_place = is_short(batch, batch.segments[segment]),
            .precise = is_precise(batch, batch.segments[segment]),
        },
        plan
    );
  }
}

void append_parts(const AttentionBatch& batch, AttentionItem item, AttentionPlan& plan) {
  const AttentionSegment& segment = batch.segments[item.segment];
  const int64_t group = batch.shape.num_heads / batch.shape.num_kv_heads;
  const int64_t kv_heads = (item.num_heads + group - 1) / group;
  const VisibleKeys keys = keys_of(batch, segment);
  const int64_t first = keys.begin / plan.part_keys;
  const bool whole = !is_short(batch, segment) || keys.end - keys.begin <= plan.part_keys;
  const int64_t parts = whole ? 1 : (keys.end + plan.part_keys - 1) / plan.part_keys - first;
  if (parts > 1) {
    const int32_t rows = item.num_tokens * item.num_heads;
    item.split = static_cast<int32_t>(plan.splits.size());
    plan.splits.push_back({
        .first_key = first * plan.part_keys,
        .num_parts = static_cast<int32_t>(parts),
        .rows = rows,
        .first_row = plan.partial_rows,
    });
    plan.partial_rows += parts * rows;
  }
  for (int64_t part = first; part < first + parts; ++part) {
    item.kv_begin = parts > 1 ? part * plan.part_keys : 0;
    item.kv_end =
        parts > 1 ? std::min(segment.kv_len, item.kv_begin + plan.part_keys) : segment.kv_len;
    const int64_t read =
        std::max<int64_t>(0, std::min(item.kv_end, keys.end) - std::max(item.kv_begin, keys.begin));
    plan.items.push_back(item);
    plan.item_costs.push_back(visible_pairs(batch, item) + kPackingRows * kv_heads * read);
  }
}

}  // namespace cpattn
