// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

#include "cpattn/attention/attention_plan.h"

namespace cpattn {
namespace {

TEST(PackMask, SetsOneBitPerVisibleKey) {
  const std::vector<AttentionSegment> segments = {
      {.q_len = 2, .kv_len = 3, .first_position = 1}, {.q_begin = 2, .q_len = 1, .kv_len = 40}
  };
  std::vector<uint8_t> values(46, 0);
  values[0] = values[4] = values[6 + 39] = 1;
  const std::vector<int64_t> starts = {0, 6};
  const std::vector<int64_t> strides = {3, 40};
  const MaskBits mask = pack_mask(segments, values.data(), starts, strides, false);
  EXPECT_EQ(mask.row_bytes, (std::vector<int64_t>{4, 8}));
  EXPECT_EQ(mask.bits[0], 0b001);
  EXPECT_EQ(mask.bits[4], 0b010);
  EXPECT_EQ(mask.bits[8 + 4], 0b10000000);
  const MaskBits hidden = pack_mask(segments, values.data(), starts, strides, true);
  EXPECT_EQ(hidden.bits[0], 0b110);
  EXPECT_EQ(hidden.bits[8 + 5], 0) << "no bit beyond the last key";
}

TEST(PackMask, EveryBitIsThatOfItsRowAndKey) {
  std::mt19937 random(9);
  for (int round = 0; round < 40; ++round) {
    std::vector<AttentionSegment> segments(1 + random() % 3);
    std::vector<int64_t> starts, strides;
    int64_t num_values = 0;
    for (AttentionSegment& segment : segments) {
      segment.q_len = random() % 5;
      segment.kv_len = random() % 80;
      starts.push_back(num_values + static_cast<int64_t>(random() % 3));
      strides.push_back(segment.kv_len + static_cast<int64_t>(random() % 4));
      num_values = starts.back() + segment.q_len * strides.back();
    }
    std::vector<uint8_t> values(num_values + 1);
    for (uint8_t& value : values) value = random() % 2 * 255;
    const bool inverted = round % 2 == 1;
    const MaskBits mask = pack_mask(segments, values.data(), starts, strides, inverted);
    int64_t offset = 0;
    for (std::size_t s = 0; s < segments.size(); ++s) {
      EXPECT_EQ(mask.offsets[s], offset);
      EXPECT_EQ(mask.row_bytes[s] % 4, 0);
      EXPECT_GE(mask.row_bytes[s] * 8, segments[s].kv_len);
      EXPECT_LT(mask.row_bytes[s] * 8, segments[s].kv_len + 32);
      for (int64_t row = 0; row < segments[s].q_len; ++row) {
        for (int64_t key = 0; key < mask.row_bytes[s] * 8; ++key) {
          const int bit = mask.bits.at(offset + row * mask.row_bytes[s] + key / 8) >> key % 8 & 1;
          const bool given =
              key < segments[s].kv_len && values[starts[s] + row * strides[s] + key] != 0;
          EXPECT_EQ(bit, key < segments[s].kv_len && given != inverted);
        }
      }
      offset += segments[s].q_len * mask.row_bytes[s];
    }
    EXPECT_EQ(std::ssize(mask.bits), offset);
  }
}

TEST(RepackMask, IsTheMaskOfTheSameValuesWhereverRowsBegin) {
  std::mt19937 random(4);
  for (int round = 0; round < 200; ++round) {
    std::vector<AttentionSegment> segments(1 + random() % 3);
    std::vector<int64_t> starts, strides;
    int64_t num_values = 0;
    for (AttentionSegment& segment : segments) {
      segment.q_len = random() % 4;
      segment.kv_len = random() % 80;
      starts.push_back(num_values + static_cast<int64_t>(random() % 9));
      strides.push_back(segment.kv_len + static_cast<int64_t>(random() % 9));
      num_values = starts.back();
      if (segment.q_len > 0) num_values += (segment.q_len - 1) * strides.back() + segment.kv_len;
    }
    std::vector<uint8_t> values(num_values);
    // Memory of just the bytes that have bits of the rows: sanitizers see any step beside it.
    std::vector<uint8_t> bits((num_values + 7) / 8);
    for (int64_t i = 0; i < num_values; ++i) {
      values[i] = random() % 2;
      bits[i / 8] |= static_cast<uint8_t>(values[i] << i % 8);
    }
    EXPECT_EQ(
        repack_mask(segments, bits.data(), starts, strides),
        pack_mask(segments, values.data(), starts, strides, /*inverted=*/false)
    );
  }
}

/// 600 tokens behind 400 cached ones, whose mask shows what `shows` says of a row and a key.
template <class Shows>
AttentionBatch masked_batch(Shows shows) {
  AttentionBatch batch{
      .shape = {8, 2, 64, 64},
      .num_rows = 600,
      .page_size = 1000,
      .num_pages = 1,
      .segments = {{.q_len = 600, .kv_len = 1000, .first_position = 400}},
      .pages = {.indptr = {0, 1}, .page_ids = {0}},
      .batch_invariant = true,
  };
  std::vector<uint8_t> values(600 * 1000);
  for (int64_t i = 0; i < std::ssize(values); ++i) values[i] = shows(i / 1000, i % 1000);
  batch.mask = pack_mask(
      batch.segments, values.data(), std::vector<int64_t>{0}, std::vector<int64_t>{1000}, false
  );
  return batch;
}

int64_t total_cost(const AttentionPlan& plan) {
  int64_t sum = 0;
  for (const int64_t cost : plan.item_costs) sum += cost;
  return sum;
}

TEST(MaskedPlan, CostsAreWhatMaskAndWindowShow) {
  for (const int64_t left : {kUnboundedKeys, int64_t{100}}) {
    AttentionBatch batch =
        masked_batch([](int64_t row, int64_t key) { return (row + key) % 3 == 0; });
    batch.segments[0].left = left;
    const AttentionPlan plan = plan_attention("test", batch, 0);
    for (std::size_t i = 0; i < plan.items.size(); ++i) {
      const AttentionItem& item = plan.items[i];
      int64_t pairs = 0;
      int64_t words = 0;
      for (int64_t word = 0; word < 1000; word += 32) {
        bool any = false;
        for (int64_t row = item.first_token; row < item.first_token + item.num_tokens; ++row) {
          for (int64_t key = word; key < std::min<int64_t>(word + 32, 1000); ++key) {
            const bool seen = key <= 400 + row && key >= 400 + row - left && (row + key) % 3 == 0;
            pairs += seen;
            any = any || seen;
          }
        }
        words += any;
      }
      EXPECT_EQ(visible_pairs(batch, item), pairs * item.num_heads);
      EXPECT_EQ(plan.item_costs[i], pairs * item.num_heads + 12 * 32 * words);
    }
  }
}

TEST(MaskedPlan, WhatIsHiddenCostsNothing) {
  const AttentionPlan hidden =
      plan_attention("test", masked_batch([](int64_t, int64_t) { return false; }), 0);
  EXPECT_EQ(total_cost(hidden), 0);
  EXPECT_FALSE(hidden.items.empty()) << "rows that see nothing are written, too";
}

}  // namespace
}  // namespace cpattn
