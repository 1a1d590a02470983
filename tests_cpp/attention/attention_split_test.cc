// SPDX-License-Identifier: Apache-2.0
// How segments of few tokens are divided along their keys, against a walk over all pairs.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "cpattn/attention/attention_plan.h"

namespace cpattn {
namespace {

bool sees(
    const AttentionBatch& batch, const AttentionSegment& segment, int64_t token, int64_t key
) {
  const int64_t position = segment.first_position + token * segment.position_step;
  if (key < position - segment.left || key > position + segment.right) return false;
  if (batch.key_ranges.empty()) return true;
  const int32_t* range = &batch.key_ranges[2 * (segment.q_begin + token)];
  return range[0] <= key && key < range[1];
}

/// The keys from the first to the last that a token of the segment sees, half-open.
std::pair<int64_t, int64_t> span_of(const AttentionBatch& batch, const AttentionSegment& segment) {
  int64_t begin = segment.kv_len, end = 0;
  for (int64_t token = 0; token < segment.q_len; ++token) {
    for (int64_t key = 0; key < segment.kv_len; ++key) {
      if (!sees(batch, segment, token, key)) continue;
      begin = std::min(begin, key);
      end = std::max(end, key + 1);
    }
  }
  return {std::min(begin, end), end};
}

bool is_short(const AttentionSegment& segment) {
  return segment.q_len > 0 && segment.q_len <= kMaxDecodeTokens;
}

int64_t group_of(const AttentionShape& shape) { return shape.num_heads / shape.num_kv_heads; }

/// Up to 16 rows for each KV head, 8 of wide heads.
bool may_read_in_place(const AttentionShape& shape, const AttentionSegment& segment) {
  const int64_t rows = segment.q_len * group_of(shape);
  return is_short(segment) && rows <= (shape.head_dim > 256 ? 8 : 16);
}

AttentionBatch random_batch(std::mt19937& random) {
  const int32_t dims[] = {16, 64, 128, 256, 272, 576};
  const int32_t kv_heads = 1 << random() % 5;
  AttentionBatch batch{
      .shape =
          {
              .num_heads = kv_heads * (1 << random() % 5),
              .num_kv_heads = kv_heads,
              .head_dim = dims[random() % 6],
              .v_head_dim = dims[random() % 6],
          },
      .page_size = 16,
      .num_pages = 1 << 20,
  };
  const int64_t sides[] = {0, 1, 700, kUnboundedKeys};
  const auto num_segments = static_cast<int64_t>(1 + random() % 4);
  for (int64_t i = 0; i < num_segments; ++i) {
    const int64_t q_len = random() % 20;
    const int64_t kv_len = random() % 8 ? q_len + random() % 5000 : random() % 30;
    batch.segments.push_back({
        .q_begin = batch.num_rows,
        .q_len = q_len,
        .kv_len = kv_len,
        .first_position = kv_len - q_len - static_cast<int64_t>(random() % 3 * 100),
        .position_step = static_cast<int64_t>(random() % 3),
        .table_row = i,
        .left = sides[random() % 4],
        .right = sides[random() % 4],
    });
    batch.num_rows += q_len;
  }
  if (random() % 3 == 0) {
    for (AttentionSegment& segment : batch.segments) {
      int64_t begin = 0, end = 0;
      segment.first_position = 0;
      segment.position_step = 0;
      segment.right = segment.left = kUnboundedKeys;
      for (int64_t token = 0; token < segment.q_len; ++token) {
        const auto more = static_cast<int64_t>(random() % (segment.kv_len - end + 1));
        end = std::min(std::max<int64_t>(1, end + more), segment.kv_len);
        begin += end == 0 ? 0 : static_cast<int64_t>(random() % (end - begin));
        batch.key_ranges.insert(
            batch.key_ranges.end(), {static_cast<int32_t>(begin), static_cast<int32_t>(end)}
        );
      }
    }
  }
  return batch;
}

int64_t count_pairs(const AttentionBatch& batch, const AttentionItem& item) {
  const AttentionSegment& segment = batch.segments[item.segment];
  int64_t pairs = 0;
  for (int64_t t = item.first_token; t < item.first_token + item.num_tokens; ++t) {
    for (int64_t key = item.kv_begin; key < item.kv_end; ++key) {
      pairs += sees(batch, segment, t, key);
    }
  }
  return pairs * item.num_heads;
}

/// All that is said of the items of one segment and the same heads, in the order of their keys.
void expect_parts(
    const AttentionPlan& plan, const std::vector<AttentionItem>& items, int64_t& partial_rows
) {
  const AttentionItem& first = items.front();
  const AttentionSegment& segment = plan.batch.segments[first.segment];
  const auto [begin, end] = span_of(plan.batch, segment);
  EXPECT_EQ(first.num_tokens, segment.q_len);
  if (end - begin <= plan.part_keys) {
    ASSERT_EQ(items.size(), 1U);
    EXPECT_EQ(std::pair(first.kv_begin, first.kv_end), std::pair(int64_t{0}, segment.kv_len));
    EXPECT_EQ(first.split, -1);
    return;
  }
  // Multiples of part_keys, from the last one that is not after the first key seen.
  EXPECT_EQ(first.kv_begin % plan.part_keys, 0);
  EXPECT_LE(first.kv_begin, begin);
  EXPECT_GT(first.kv_begin + plan.part_keys, begin);
  int64_t key = first.kv_begin;
  for (const AttentionItem& item : items) {
    EXPECT_EQ(item.kv_begin, key);
    key = std::min(segment.kv_len, key + plan.part_keys);
    EXPECT_EQ(item.kv_end, key);
    EXPECT_LT(item.kv_begin, end) << "a part of keys that nobody sees";
    EXPECT_EQ(item.split, first.split);
  }
  EXPECT_GE(key, end);
  const AttentionSplit& split = plan.splits.at(first.split);
  EXPECT_EQ(split.first_key, first.kv_begin);
  EXPECT_EQ(split.num_parts, std::ssize(items));
  EXPECT_EQ(split.rows, first.num_tokens * first.num_heads);
  partial_rows += split.rows * split.num_parts;
}

void expect_costs(const AttentionPlan& plan) {
  for (std::size_t i = 0; i < plan.items.size(); ++i) {
    const AttentionItem& item = plan.items[i];
    const AttentionSegment& segment = plan.batch.segments[item.segment];
    if (!is_short(segment)) continue;
    const auto [begin, end] = span_of(plan.batch, segment);
    const int64_t group = group_of(plan.batch.shape);
    const int64_t kv_heads = (item.num_heads + group - 1) / group;
    const int64_t read = std::min(item.kv_end, end) - std::max(item.kv_begin, begin);
    const int64_t cost = count_pairs(plan.batch, item) + 12 * kv_heads * read;
    // Tokens that stand apart may see neither end of what their windows span, which counts as read.
    const int64_t gaps = 2 * std::max<int64_t>(0, segment.position_step - 1);
    EXPECT_GE(plan.item_costs[i], cost);
    EXPECT_LE(plan.item_costs[i], cost + 12 * kv_heads * gaps);
    EXPECT_EQ(visible_pairs(plan.batch, item), count_pairs(plan.batch, item));
  }
}

TEST(AttentionSplit, PartsHoldEveryVisibleKeyOnce) {
  std::mt19937 random(3);
  for (int round = 0; round < 60; ++round) {
    SCOPED_TRACE(round);
    const AttentionPlan plan = plan_attention("test", random_batch(random), 0);
    std::map<std::pair<int32_t, int32_t>, std::vector<AttentionItem>> groups;
    for (const AttentionItem& item : plan.items) {
      const AttentionSegment& segment = plan.batch.segments[item.segment];
      EXPECT_EQ(item.may_read_in_place, may_read_in_place(plan.batch.shape, segment));
      const bool few_rows = segment.q_len * group_of(plan.batch.shape) <= 4;
      EXPECT_EQ(item.precise, item.may_read_in_place && few_rows);
      if (is_short(segment)) groups[{item.segment, item.first_head}].push_back(item);
    }
    int64_t partial_rows = 0;
    for (auto& [heads, items] : groups) {
      std::sort(items.begin(), items.end(), [](const auto& a, const auto& b) {
        return a.kv_begin < b.kv_begin;
      });
      expect_parts(plan, items, partial_rows);
    }
    EXPECT_EQ(plan.partial_rows, partial_rows);
    int64_t first_row = 0;
    for (const AttentionSplit& split : plan.splits) {
      EXPECT_EQ(split.first_row, first_row);
      first_row += int64_t{split.rows} * split.num_parts;
    }
    expect_costs(plan);
  }
}

TEST(AttentionSplit, HeadsReadTogetherMakeRunsOfMemory) {
  for (const auto& [head_dim, heads] : std::vector<std::pair<int32_t, int32_t>>{
           {64, 16}, {128, 8}, {256, 4}, {272, 3}, {512, 2}, {576, 1}
       }) {
    AttentionBatch batch{.shape = {24, 24, head_dim, 64}, .num_rows = 1, .page_size = 16};
    constexpr int kSequences = 16;
    for (int i = 0; i < kSequences; ++i) {
      batch.segments.push_back({.q_begin = i, .q_len = 1, .kv_len = 5, .first_position = 4});
    }
    batch.num_rows = kSequences;
    const AttentionPlan plan = plan_attention("test", batch, 0);
    const int64_t runs = (24 + heads - 1) / heads;
    EXPECT_EQ(std::ssize(plan.items), kSequences * runs) << head_dim;
    for (const AttentionItem& item : plan.items) {
      EXPECT_LE(item.num_heads, heads) << head_dim;
      EXPECT_GE(item.num_heads, 24 / runs) << "of equal size";
    }
  }
}

TEST(AttentionSplit, FewShortSequencesAreSharedOutByHeads) {
  AttentionBatch batch{.shape = {24, 24, 64, 64}, .num_rows = 1, .page_size = 16};
  batch.segments = {{.q_len = 1, .kv_len = 5, .first_position = 4}};
  EXPECT_EQ(std::ssize(plan_attention("test", batch, 0).items), 24);
}

/// A batch of one token each, that sees all keys.
AttentionBatch decode_batch(AttentionShape shape, std::vector<int64_t> kv_lens, int64_t q_len = 1) {
  AttentionBatch batch{.shape = shape, .page_size = 16, .num_pages = 1 << 20};
  const std::vector<int64_t> q_lens(kv_lens.size(), q_len);
  batch.segments = sequence_segments("test", q_lens, kv_lens);
  batch.num_rows = std::ssize(kv_lens) * q_len;
  return batch;
}

TEST(AttentionSplit, PartsAreAsShortAs256OfThemAllow) {
  // Read in place they begin at multiples of 512 keys, packed at multiples of 1024.
  for (const auto& [num_heads, granule] : {std::pair(16, 512), std::pair(32, 1024)}) {
    for (int64_t kv_len : {1, 512, 256 * 512, 256 * 512 + 1, 256 * 1024, 256 * 1024 + 1, 600000}) {
      // Wide values take much memory, narrow ones do not.
      const AttentionPlan plan =
          plan_attention("test", decode_batch({num_heads, 1, 64, 16}, {kv_len}), 0);
      EXPECT_EQ(plan.part_keys % granule, 0);
      EXPECT_GE(plan.part_keys * 256, kv_len);
      const int64_t shorter = plan.part_keys - granule;
      EXPECT_TRUE(shorter == 0 || shorter * 256 < kv_len);
    }
  }
  const AttentionPlan two = plan_attention("test", decode_batch({1, 1, 64, 16}, {65536, 65537}), 0);
  EXPECT_EQ(two.part_keys, 1024) << "of the batch, not of a sequence";
}

TEST(AttentionSplit, SegmentsOfManyTokensDoNotCount) {
  AttentionBatch batch = decode_batch({8, 1, 64, 16}, {300000, 600000});
  const int64_t short_alone = plan_attention("test", batch, 0).part_keys;
  for (std::size_t place = 0; place < 3; ++place) {
    AttentionBatch mixed = batch;
    mixed.segments.insert(
        mixed.segments.begin() + place,
        {.q_begin = 2, .q_len = kMaxDecodeTokens + 1, .kv_len = 900000, .first_position = 800000}
    );
    EXPECT_EQ(plan_attention("test", mixed, 0).part_keys, short_alone) << place;
  }
}

TEST(AttentionSplit, PartsAreFewerWhereTheirMemoryIsShort) {
  // 16 tokens of 128 heads with 508 + 4 floats: 4 MiB for each part, 32 MiB for thrice as many.
  const AttentionShape shape{
      .num_heads = 128, .num_kv_heads = 1, .head_dim = 64, .v_head_dim = 496
  };
  const int64_t part_bytes = int64_t{16} * 128 * (496 + 4) * 4;
  const int64_t parts = (int64_t{32} << 20) / part_bytes / 3;
  ASSERT_EQ(parts, 2);
  const AttentionPlan plan = plan_attention("test", decode_batch(shape, {10240}, 16), 0);
  EXPECT_EQ(plan.part_keys, 10240 / parts);
  EXPECT_EQ(plan.partial_rows, 2 * 16 * 128);
}

TEST(AttentionSplit, AsManyKeysAsAPartHasAreNotDivided) {
  AttentionBatch batch = decode_batch({8, 1, 64, 64}, {612});
  batch.segments[0].left = 511;  // 512 keys, on both sides of a multiple of 512
  EXPECT_EQ(plan_attention("test", batch, 0).part_keys, 512);
  EXPECT_EQ(plan_attention("test", batch, 0).items.size(), 1U);
  batch.segments[0].left = 512;
  EXPECT_EQ(plan_attention("test", batch, 0).items.size(), 2U);
}

TEST(AttentionSplit, BatchInvariantPlansHaveNoParts) {
  AttentionBatch batch = decode_batch({8, 1, 64, 64}, {100000, 20});
  EXPECT_FALSE(plan_attention("test", batch, 0).splits.empty());
  batch.batch_invariant = true;
  for (const bool precise : {false, true}) {
    batch.precise = precise;
    const AttentionPlan plan = plan_attention("test", batch, 0);
    EXPECT_TRUE(plan.splits.empty());
    for (const AttentionItem& item : plan.items) {
      EXPECT_FALSE(item.may_read_in_place);
      EXPECT_EQ(item.precise, precise);
    }
  }
}

TEST(AttentionSplit, BatchInvariantRowsAreReadByRunsOfHeadsInLargeBatchesAlone) {
  for (const auto& [sequences, heads] :
       std::vector<std::pair<int, int32_t>>{{1, 1}, {8, 1}, {16, 2}, {64, 8}, {100, 8}}) {
    AttentionBatch batch = decode_batch({32, 8, 128, 128}, std::vector<int64_t>(sequences, 9000));
    batch.batch_invariant = true;
    const AttentionPlan plan = plan_attention("test", batch, 0);
    EXPECT_EQ(std::ssize(plan.items), sequences * 8 / heads);
    for (const AttentionItem& item : plan.items) {
      EXPECT_EQ(item.num_heads, 4 * heads) << sequences;
      EXPECT_FALSE(item.may_read_in_place);
    }
  }
}

}  // namespace
}  // namespace cpattn
