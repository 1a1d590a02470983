// SPDX-License-Identifier: Apache-2.0
#include "cpattn/attention/attention_plan.h"

#include <algorithm>
#include <array>
#include <iterator>

#include "cpattn/base/check.h"
#include "cpattn/base/trace.h"
#include "meta/attention/attention_items.h"

namespace cpattn {
namespace {

constexpr int32_t kMaxHeads = 1 << 16;
/// Most rows of an item. They share one packing of K and V, which costs as much as a dozen rows of
/// arithmetic from a cache and thirty from memory: more rows gain little.
constexpr int64_t kMaxItemRows = 2048;
/// Items are smaller, down to kMinItemRows rows, if there were fewer than kBalancedItems.
constexpr int64_t kBalancedItems = 64;
constexpr int64_t kMinItemRows = 384;
constexpr int64_t kRowGranule = 24;
/// Limit of the queries and accumulators of an item, in float32.
constexpr int64_t kItemBytes = 4 << 20;
/// Most items of a plan, far above any batch: a million tokens of 128 heads make a tenth of them,
/// and planning them takes a second.
constexpr int64_t kMaxItems = int64_t{1} << 21;

int64_t max_item_rows(const AttentionBatch& batch) {
  const AttentionShape& shape = batch.shape;
  // More tokens change nothing, and their rows might exceed int64.
  constexpr int64_t kEnough = kMaxItemRows * kBalancedItems;
  int64_t tokens = 0;
  for (const AttentionSegment& segment : batch.segments) {
    tokens = std::min(tokens + segment.q_len, kEnough);
  }
  const int64_t share = tokens * shape.num_heads / kBalancedItems;
  const int64_t row_bytes =
      int64_t{4} * (padded_dim(shape.head_dim) + padded_dim(shape.v_head_dim));
  const int64_t rows =
      std::min(std::clamp(share, kMinItemRows, kMaxItemRows), kItemBytes / row_bytes);
  return rows / kRowGranule * kRowGranule;
}

/// Sum of clamp(first + i * step, 0, limit) over i in [0, count).
int64_t sum_clamped(int64_t first, int64_t step, int64_t count, int64_t limit) {
  if (step == 0) return count * std::clamp<int64_t>(first, 0, limit);
  const auto terms_below = [&](int64_t bound) {  // terms with value < bound
    return std::clamp<int64_t>((bound - first + step - 1) / step, 0, count);
  };
  const int64_t negative = first >= 0 ? 0 : terms_below(0);
  const int64_t inside = (first >= limit ? 0 : terms_below(limit)) - negative;
  const int64_t start = first + negative * step;
  const int64_t ramp = inside * start + step * (inside * (inside - 1) / 2);
  return ramp + (count - negative - inside) * limit;
}

/// Visible (token, key) pairs of tokens [first, first + count) of a segment with keys below kv_end.
int64_t visible_pairs(
    const AttentionBatch& batch,
    const AttentionSegment& segment,
    int64_t first,
    int64_t count,
    int64_t kv_end
) {
  if (!batch.mask.empty()) return shown_by_mask(batch, segment, first, count, 0, kv_end).pairs;
  if (!batch.key_ranges.empty()) {
    int64_t pairs = 0;
    for (int64_t token = first; token < first + count; ++token) {
      const VisibleKeys keys = visible_keys(batch, segment, token);
      pairs += std::max<int64_t>(0, std::min(keys.end, kv_end) - keys.begin);
    }
    return pairs;
  }
  const int64_t position = segment.first_position + first * segment.position_step;
  const int64_t step = segment.position_step;
  return sum_clamped(position + segment.right + 1, step, count, kv_end) -
         sum_clamped(position - segment.left, step, count, kv_end);
}

/// The keys that an item of tokens [begin, end) packs.
int64_t packed_keys(
    const AttentionBatch& batch, const AttentionSegment& segment, int64_t begin, int64_t end
) {
  if (!batch.mask.empty()) {
    return shown_by_mask(batch, segment, begin, end - begin, 0, segment.kv_len).keys;
  }
  const int64_t from = std::min(visible_keys(batch, segment, begin).begin, segment.kv_len);
  return std::max(visible_keys(batch, segment, end - 1).end, from) - from;
}

void check_num_items(const char* function, int64_t num_items) {
  check(
      num_items <= kMaxItems, function, ": the batch must be divided into at most ", kMaxItems,
      " items of work, got ", num_items, " or more; plan fewer tokens, sequences or heads at a time"
  );
}

void append_items(
    const char* function,
    const AttentionBatch& batch,
    int32_t index,
    int64_t max_rows,
    AttentionPlan& plan
) {
  const AttentionSegment& segment = batch.segments[index];
  const int64_t group = batch.shape.num_heads / batch.shape.num_kv_heads;
  const int64_t heads = std::min(group, max_rows);
  const int64_t max_tokens = std::max<int64_t>(1, max_rows / heads);
  // Pieces have equal sizes: a short last piece would pack its keys for few rows.
  const int64_t pieces = (segment.q_len + max_tokens - 1) / max_tokens;
  const int64_t num_items = pieces * ((batch.shape.num_heads + heads - 1) / heads);
  check_num_items(function, std::ssize(plan.items) + num_items);
  for (int64_t piece = 0; piece < pieces; ++piece) {
    const int64_t begin = segment.q_len * piece / pieces;
    const int64_t end = segment.q_len * (piece + 1) / pieces;
    const int64_t pairs = visible_pairs(batch, segment, begin, end - begin, segment.kv_len);
    const int64_t packing = kPackingRows * packed_keys(batch, segment, begin, end);
    for (int64_t kv_head = 0; kv_head < batch.shape.num_kv_heads; ++kv_head) {
      for (int64_t head = 0; head < group; head += heads) {
        const int64_t count = std::min(heads, group - head);
        const AttentionItem item{
            .segment = index,
            .first_head = static_cast<int32_t>(kv_head * group + head),
            .num_heads = static_cast<int32_t>(count),
            .num_tokens = static_cast<int32_t>(end - begin),
            .first_token = begin,
            .kv_end = segment.kv_len,
            .precise = is_precise(batch, segment),
        };
        if (is_short(batch, segment)) {
          append_parts(batch, item, plan);
          continue;
        }
        plan.items.push_back(item);
        plan.item_costs.push_back(pairs * count + packing);
      }
    }
  }
}

/// Items that read the same keys, of one sequence and KV head, stay together: the keys then come
/// from memory once for any number of query blocks. Groups, and the items of each, are sorted by
/// falling cost, so that the last items to finish are short ones.
void sort_items(AttentionPlan& plan) {
  const AttentionBatch& batch = plan.batch;
  const int64_t group_size = batch.shape.num_heads / batch.shape.num_kv_heads;
  const auto keys_of = [&](const AttentionItem& item) {
    return batch.segments[item.segment].table_row * batch.shape.num_kv_heads +
           item.first_head / group_size;
  };
  // Sorted by keys first, so that memory grows with items, however many sequences are empty.
  std::vector<std::array<int64_t, 4>> order(plan.items.size());
  for (std::size_t i = 0; i < order.size(); ++i) {
    order[i] = {0, keys_of(plan.items[i]), -plan.item_costs[i], static_cast<int64_t>(i)};
  }
  std::sort(order.begin(), order.end());
  for (std::size_t i = 0; i < order.size(); ++i) {
    const bool first = i == 0 || order[i][1] != order[i - 1][1];
    order[i][0] = first ? order[i][2] : order[i - 1][0];
  }
  std::sort(order.begin(), order.end());
  std::vector<AttentionItem> items(order.size());
  std::vector<int64_t> costs(order.size());
  for (std::size_t i = 0; i < order.size(); ++i) {
    items[i] = plan.items[order[i][3]];
    costs[i] = plan.item_costs[order[i][3]];
  }
  plan.items = std::move(items);
  plan.item_costs = std::move(costs);
}

}  // namespace

int64_t check_head_dim(const char* function, const char* name, int64_t dim) {
  check(
      dim >= 1 && dim <= kMaxHeadDim, function, ": ", name, " must be in [1, ", kMaxHeadDim,
      "], got ", dim
  );
  return dim;
}

void check_head_parts(const char* function, int64_t nope_dim, int64_t rope_dim) {
  check(
      padded_dim(nope_dim) + padded_dim(rope_dim) <= kMaxHeadDim, function,
      ": the dimensions of q and of its rope part, each filled up to a multiple of 16, must be at "
      "most ",
      kMaxHeadDim, " together, got ", nope_dim, " and ", rope_dim
  );
}

VisibleKeys visible_keys(
    const AttentionBatch& batch, const AttentionSegment& segment, int64_t token
) {
  const int64_t position = segment.first_position + token * segment.position_step;
  VisibleKeys keys = {
      std::max<int64_t>(0, position - segment.left),
      std::min(segment.kv_len, position + segment.right + 1)
  };
  if (!batch.key_ranges.empty()) {
    const int32_t* range = &batch.key_ranges[2 * (segment.q_begin + token)];
    keys = {std::max<int64_t>(keys.begin, range[0]), std::min<int64_t>(keys.end, range[1])};
  }
  return keys;
}

AttentionPlan plan_attention(const char* function, AttentionBatch batch, int num_threads) {
  const TraceSpan span(TraceScope::plan);
  const AttentionShape& shape = batch.shape;
  check(shape.num_kv_heads >= 1, function, ": num_kv_heads must be >= 1, got ", shape.num_kv_heads);
  check(
      shape.num_heads >= 1 && shape.num_heads % shape.num_kv_heads == 0, function,
      ": num_heads must be a positive multiple of num_kv_heads (", shape.num_kv_heads, "), got ",
      shape.num_heads
  );
  check(
      shape.num_heads <= kMaxHeads, function, ": num_heads must be at most ", kMaxHeads, ", got ",
      shape.num_heads
  );
  check_head_dim(function, "head_dim", shape.head_dim);
  check_head_dim(function, "v_head_dim", shape.v_head_dim);
  check(num_threads >= 0, function, ": num_threads must be >= 1, got ", num_threads);

  AttentionPlan plan;
  plan.num_threads = num_threads;
  const int64_t max_rows = max_item_rows(batch);
  plan.part_keys = part_keys(batch);
  const int64_t run_heads = heads_per_run(batch, plan.part_keys);
  for (std::size_t i = 0; i < batch.segments.size(); ++i) {
    const auto segment = static_cast<int32_t>(i);
    if (is_read_bound(batch, batch.segments[i])) {
      append_read_bound_items(batch, segment, run_heads, plan);
      check_num_items(function, std::ssize(plan.items));
    } else {
      append_items(function, batch, segment, max_rows, plan);
    }
  }
  plan.batch = std::move(batch);
  sort_items(plan);
  return plan;
}

int64_t visible_pairs(const AttentionBatch& batch, const AttentionItem& item) {
  const AttentionSegment& segment = batch.segments[item.segment];
  if (!batch.mask.empty()) {
    const ShownKeys shown = shown_by_mask(
        batch, segment, item.first_token, item.num_tokens, item.kv_begin, item.kv_end
    );
    return item.num_heads * shown.pairs;
  }
  const auto pairs_below = [&](int64_t key) {
    return visible_pairs(batch, segment, item.first_token, item.num_tokens, key);
  };
  return item.num_heads * (pairs_below(item.kv_end) - pairs_below(item.kv_begin));
}

std::vector<AttentionSegment> sequence_segments(
    const char* function, std::span<const int64_t> q_lens, std::span<const int64_t> kv_lens
) {
  check(
      q_lens.size() == kv_lens.size(), function,
      ": q_lens and kv_lens must have the same length, got ", q_lens.size(), " and ", kv_lens.size()
  );
  std::vector<AttentionSegment> segments;
  segments.reserve(q_lens.size());
  int64_t rows = 0;
  for (std::size_t i = 0; i < q_lens.size(); ++i) {
    check(
        q_lens[i] >= 0 && q_lens[i] <= INT32_MAX, function, ": q_lens must be in [0, 2^31), got ",
        q_lens[i], " at index ", i
    );
    check(
        kv_lens[i] >= 0 && kv_lens[i] <= INT32_MAX, function,
        ": kv_lens must be in [0, 2^31), got ", kv_lens[i], " at index ", i
    );
    segments.push_back({
        .q_begin = rows,
        .q_len = q_lens[i],
        .kv_len = kv_lens[i],
        .first_position = kv_lens[i] - q_lens[i],
        .table_row = static_cast<int64_t>(i),
    });
    rows += q_lens[i];
  }
  return segments;
}

void set_first_positions(
    const char* function, std::span<const int64_t> positions, std::span<AttentionSegment> segments
) {
  check(
      positions.size() == segments.size(), function, ": first_positions must have ",
      segments.size(), " ints, one for each sequence, got ", positions.size()
  );
  for (std::size_t i = 0; i < segments.size(); ++i) {
    check(
        positions[i] >= -INT32_MAX && positions[i] <= INT32_MAX, function,
        ": first_positions must be in (-2^31, 2^31), got ", positions[i], " at index ", i
    );
    segments[i].first_position = positions[i];
  }
}

void set_key_ranges(const char* function, std::span<const int64_t> ranges, AttentionBatch& batch) {
  check(
      std::ssize(ranges) == 2 * batch.num_rows, function,
      ": key_ranges must have a begin and an end for each of ", batch.num_rows, " tokens, got ",
      ranges.size(), " ints"
  );
  for (const AttentionSegment& segment : batch.segments) {
    int64_t least_begin = 0, least_end = 0;
    for (int64_t row = segment.q_begin; row < segment.q_begin + segment.q_len; ++row) {
      const int64_t begin = ranges[2 * row], end = ranges[2 * row + 1];
      check(
          least_begin <= begin && begin <= end && least_end <= end && end <= segment.kv_len,
          function, ": key_ranges must lie in [0, kv_len = ", segment.kv_len,
          "] and ascend within a sequence, got ", begin, " to ", end, " for token ", row, " after ",
          least_begin, " to ", least_end
      );
      least_begin = begin;
      least_end = end;
    }
  }
  batch.key_ranges.assign(ranges.begin(), ranges.end());
}

}  // namespace cpattn
