// SPDX-License-Identifier: Apache-2.0
#include "cpattn/attention/attention_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "cpattn/attention/attention_plan_state.h"
#include "testing.h"

namespace cpattn {
namespace {

AttentionBatch batch_of(std::vector<int64_t> q_lens, std::vector<int64_t> kv_lens) {
  AttentionBatch batch{.shape = {8, 2, 64, 64}, .page_size = 16, .num_pages = 1 << 20};
  batch.segments = sequence_segments("test", q_lens, kv_lens);
  batch.num_rows = std::accumulate(q_lens.begin(), q_lens.end(), int64_t{0});
  return batch;
}

using testing::message_of;
using Ints = std::vector<int64_t>;

std::string csr_message(
    const Ints& indptr, const Ints& indices, const Ints& last, int64_t page_size = 16
) {
  Ints kv_lens;
  return message_of([&] {
    page_table_from_csr("test", indptr, indices, last, page_size, 100, kv_lens);
  });
}

TEST(PageTable, OffsetsAreCheckedBeforeTheyAreFollowed) {
  EXPECT_EQ(csr_message({0, 1, 2}, {0, 1}, {1, 1}), "no error");
  EXPECT_EQ(
      csr_message({0, 1000, 2}, {0, 1}, {1, 1}),
      "test: kv_indptr must be at most the length of kv_indices, 2, got 1000 at index 1"
  );
  EXPECT_EQ(
      csr_message({0, 2, 1, 2}, {0, 1}, {1, 1, 1}),
      "test: kv_indptr must be prefix sums, which never decrease, got 1 after 2 at index 2"
  );
  EXPECT_EQ(
      csr_message({0, -1, 2}, {0, 1}, {1, 1}),
      "test: kv_indptr must be prefix sums, which never decrease, got -1 after 0 at index 1"
  );
  EXPECT_EQ(csr_message({1, 2}, {0, 1}, {1}), "test: kv_indptr must begin with 0, got 1");
  EXPECT_EQ(csr_message({}, {0, 1}, {1}), "test: kv_indptr must begin with 0, got nothing");
}

TEST(PageTable, PageSizesAreBounded) {
  const std::vector<int32_t> cells = {0};
  const IndexTable table{.data = cells.data(), .rows = 1, .columns = 1, .row_stride = 1};
  for (int64_t page_size : {int64_t{0}, int64_t{-1}, int64_t{1} << 31, INT64_MAX}) {
    const std::string wanted =
        "test: page_size must be in [1, 2147483647], got " + std::to_string(page_size);
    EXPECT_EQ(csr_message({0, 1}, {0}, {1}, page_size), wanted);
    EXPECT_EQ(
        message_of([&] { page_table_from_blocks("test", table, Ints{5}, page_size, 10); }), wanted
    );
  }
}

TEST(PageTable, PageNumbersAreBounded) {
  Ints kv_lens;
  const auto message = [&](int64_t num_pages, const Ints& ids) {
    const auto count = static_cast<int64_t>(ids.size());
    return message_of([&] {
      page_table_from_csr("test", Ints{0, count}, ids, Ints{1}, 16, num_pages, kv_lens);
    });
  };
  EXPECT_EQ(message(0, {}), "no error");
  EXPECT_EQ(message(-1, {}), "test: num_pages must be in [0, 2^31), got -1");
  EXPECT_EQ(message(INT32_MAX, {INT32_MAX - 1}), "no error");
  EXPECT_EQ(message(int64_t{1} << 31, {}), "test: num_pages must be in [0, 2^31), got 2147483648");
  EXPECT_EQ(message(7, {0, 6}), "no error");
  constexpr char kRule[] = "test: page ids must be in [0, 7), got ";
  EXPECT_EQ(message(7, {0, 7}), kRule + std::string("7 at position 1 of sequence 0"));
  EXPECT_EQ(message(7, {-1, 6}), kRule + std::string("-1 at position 0 of sequence 0"));
}

TEST(PageTable, LastPagesHoldOneTokenToAllOfThem) {
  constexpr char kRule[] = "test: last_page_len must be in [1, 16], got ";
  EXPECT_EQ(csr_message({0, 1, 2}, {0, 1}, {1, 16}), "no error");
  EXPECT_EQ(csr_message({0, 1, 2}, {0, 1}, {1, 17}), kRule + std::string("17 at index 1"));
  EXPECT_EQ(csr_message({0, 1, 2}, {0, 1}, {0, 1}), kRule + std::string("0 at index 0"));
  EXPECT_EQ(csr_message({0, 0, 2}, {0, 1}, {99, 1}), "no error") << "ignored without pages";
  EXPECT_NE(csr_message({0, 1, 2}, {0, 1}, {1}), "no error");
  EXPECT_NE(csr_message({0, 1, 2}, {0, 1}, {1, 1, 1}), "no error");
}

TEST(PageTable, BothFormsGiveThePagesOfEachSequence) {
  std::mt19937 random(5);
  for (int round = 0; round < 100; ++round) {
    const auto page_size = static_cast<int64_t>(1 + random() % 20);
    const auto num_sequences = static_cast<std::size_t>(random() % 5);
    constexpr int64_t kColumns = 6;
    std::vector<int32_t> cells(num_sequences * kColumns);
    for (int32_t& cell : cells) cell = static_cast<int32_t>(random() % 50);
    PageTable wanted;
    Ints lens, indptr = {0}, indices, last;
    for (std::size_t row = 0; row < num_sequences; ++row) {
      lens.push_back(static_cast<int64_t>(random() % (kColumns * page_size + 1)));
      int64_t in_page = 0;
      for (int64_t token = 0; token < lens[row]; ++token, ++in_page) {
        if (token % page_size != 0) continue;
        in_page = 0;
        wanted.page_ids.push_back(cells[row * kColumns + token / page_size]);
        indices.push_back(wanted.page_ids.back());
      }
      wanted.indptr.push_back(std::ssize(wanted.page_ids));
      indptr.push_back(wanted.indptr.back());
      last.push_back(in_page);
    }
    const IndexTable table{
        .data = cells.data(),
        .rows = static_cast<int64_t>(num_sequences),
        .columns = kColumns,
        .row_stride = kColumns
    };
    EXPECT_EQ(page_table_from_blocks("test", table, lens, page_size, 50), wanted);
    Ints kv_lens;
    EXPECT_EQ(page_table_from_csr("test", indptr, indices, last, page_size, 50, kv_lens), wanted);
    EXPECT_EQ(kv_lens, lens);
  }
}

TEST(PageTable, BlockTablesHaveARowForEachSequenceAndAColumnForEachPage) {
  const std::vector<int32_t> cells(6);
  const auto message = [&](Ints lens) {
    const IndexTable table{.data = cells.data(), .rows = 2, .columns = 3, .row_stride = 3};
    return message_of([&] { page_table_from_blocks("test", table, lens, 16, 1); });
  };
  EXPECT_EQ(message({0, 48}), "no error");
  EXPECT_NE(message({49, 0}), "no error");
  EXPECT_NE(message({1}), "no error");
  EXPECT_NE(message({1, 1, 1}), "no error");
}

TEST(PlanAttention, IsBounded) {
  const auto message = [](const std::vector<int64_t>& lens, AttentionShape shape) {
    AttentionBatch batch = batch_of(lens, lens);
    batch.shape = shape;
    return message_of([&] { plan_attention("test", batch, 0); });
  };
  EXPECT_EQ(message({1}, {1 << 16, 1 << 16, 64, 64}), "no error");
  EXPECT_EQ(
      message({1}, {(1 << 16) + 1, (1 << 16) + 1, 64, 64}),
      "test: num_heads must be at most 65536, got 65537"
  );
  EXPECT_EQ(message({1 << 20}, {128, 8, 128, 128}), "no error");
  // Memory is that of items, which empty sequences have none of, not of sequences times heads.
  std::vector<int64_t> one_of_many(1 << 20, 0);
  one_of_many.back() = 1;
  EXPECT_EQ(message(one_of_many, {1 << 16, 1 << 16, 64, 64}), "no error");
  constexpr char kRule[] = "at most 2097152 items of work";
  EXPECT_NE(message({INT32_MAX}, {128, 8, 128, 128}).find(kRule), std::string::npos);
  EXPECT_NE(message(Ints(600, 1), {1 << 16, 1 << 16, 64, 64}).find(kRule), std::string::npos);
  // Rows beyond int64, which UndefinedBehaviorSanitizer sees.
  const Ints endless(1 << 16, INT32_MAX);
  EXPECT_NE(message(endless, {1 << 16, 1 << 16, 64, 64}).find(kRule), std::string::npos);
}

TEST(PlanAttention, AsManyItemsAsItMayHave) {
  // Heads that share no keys make an item each: 2^16 for each of 32 sequences.
  const auto message = [](int64_t sequences, int64_t q_len, AttentionShape shape) {
    const std::vector<int64_t> lens(sequences, q_len);
    AttentionBatch batch = batch_of(lens, lens);
    batch.shape = shape;
    return message_of([&] { plan_attention("test", batch, 0); });
  };
  const AttentionShape shape{1 << 16, 1 << 16, 64, 64};
  EXPECT_EQ(message(32, kMaxDecodeTokens + 1, shape), "no error");
  EXPECT_NE(message(33, kMaxDecodeTokens + 1, shape), "no error");
}

TEST(PlanAttention, ItemsShareOutTheRowsOfABatch) {
  // Rows of an item: a 64th of all, but 384 to 2048 and at most 4 MiB, in multiples of 24.
  const auto longest = [](int64_t tokens, AttentionShape shape) {
    AttentionBatch batch = batch_of({tokens}, {tokens});
    batch.shape = shape;
    const AttentionPlan plan = plan_attention("test", batch, 0);
    int64_t rows = 0, shortest = INT64_MAX;
    for (const AttentionItem& item : plan.items) {
      rows = std::max<int64_t>(rows, item.num_tokens * item.num_heads);
      shortest = std::min<int64_t>(shortest, item.num_tokens * item.num_heads);
    }
    EXPECT_LE(rows - shortest, shape.num_heads / shape.num_kv_heads) << "of equal size";
    return rows;
  };
  const AttentionShape narrow{1, 1, 64, 64}, wide{1, 1, 576, 512};
  EXPECT_EQ(longest(384 * 10, narrow), 384);
  EXPECT_EQ(longest(408 * 64 - 1, narrow), 384) << "a 64th is below 408";
  EXPECT_EQ(longest(408 * 64, narrow), 408);
  EXPECT_EQ(longest(2040 * 100, narrow), 2040);
  const int64_t fit = (4 << 20) / (4 * (576 + 512)) / 24 * 24;
  EXPECT_EQ(longest(fit * 200, wide), fit);
  EXPECT_EQ(longest(408 * 8, {8, 1, 64, 64}), 408) << "rows of all heads count";
}

TEST(PlanAttention, PartsStayWithinTheirMemory) {
  std::mt19937 random(11);
  int64_t most = 0;
  for (int round = 0; round < 400; ++round) {
    const int64_t tokens = 1 + random() % kMaxDecodeTokens;
    std::vector<int64_t> q_lens(1 + random() % 40, tokens), kv_lens;
    for (int64_t n : q_lens) kv_lens.push_back(n + random() % (1 << (8 + random() % 12)));
    AttentionBatch batch = batch_of(q_lens, kv_lens);
    const int32_t dims[] = {16, 64, 128, 512};
    batch.shape.v_head_dim = dims[random() % 4];
    batch.shape.num_kv_heads = 1 << random() % 4;
    batch.shape.num_heads = batch.shape.num_kv_heads * (1 << random() % 5);
    const AttentionPlan plan = plan_attention("test", batch, 0);
    const int64_t bytes = plan.partial_rows * (batch.shape.v_head_dim + kPartialStateFloats) *
                          static_cast<int64_t>(sizeof(float));
    EXPECT_LE(bytes, kMaxPartialBytes);
    most = std::max(most, bytes);
  }
  EXPECT_GT(most, kMaxPartialBytes / 4);  // some come near
}

TEST(PlanAttention, CoversEveryTokenAndHeadOnce) {
  std::mt19937 random(7);
  for (int round = 0; round < 50; ++round) {
    std::vector<int64_t> q_lens(1 + random() % 5), kv_lens;
    for (int64_t& n : q_lens) n = random() % 900;
    for (int64_t n : q_lens) kv_lens.push_back(n + random() % 500);
    AttentionBatch batch = batch_of(q_lens, kv_lens);
    const int32_t kv_heads[] = {1, 2, 8};
    batch.shape.num_heads = 8 * (1 + round % 3 * 63);
    batch.shape.num_kv_heads = kv_heads[random() % 3];
    const AttentionPlan plan = plan_attention("test", batch, 0);
    std::map<std::tuple<int32_t, int64_t, int32_t>, int> covered;
    const int32_t group = batch.shape.num_heads / batch.shape.num_kv_heads;
    for (const AttentionItem& item : plan.items) {
      EXPECT_GT(item.num_tokens, 0);
      if (item.may_read_in_place) {
        EXPECT_EQ(item.first_head % group + item.num_heads % group, 0) << "whole KV heads";
      } else {
        EXPECT_EQ(item.first_head / group, (item.first_head + item.num_heads - 1) / group)
            << "an item's heads must share one KV head";
      }
      if (item.split >= 0 && item.kv_begin > plan.splits[item.split].first_key) continue;
      for (int64_t t = 0; t < item.num_tokens; ++t) {
        for (int32_t h = 0; h < item.num_heads; h += item.num_heads > 1 ? item.num_heads - 1 : 1) {
          ++covered[{item.segment, item.first_token + t, item.first_head + h}];
        }
      }
    }
    for (const auto& [cell, count] : covered) EXPECT_EQ(count, 1);
    int64_t rows = 0;
    for (const AttentionItem& item : plan.items) {
      if (item.split >= 0 && item.kv_begin > plan.splits[item.split].first_key) continue;
      rows += int64_t{item.num_tokens} * item.num_heads;
    }
    EXPECT_EQ(rows, batch.num_rows * batch.shape.num_heads);
  }
}

TEST(PlanAttention, KeepsReadersOfTheSameKeysTogetherMostExpensiveFirst) {
  const AttentionPlan plan = plan_attention("test", batch_of({500, 900, 30}, {500, 1000, 4000}), 0);
  const int32_t group = plan.batch.shape.num_heads / plan.batch.shape.num_kv_heads;
  const auto keys_of = [&](const AttentionItem& item) {
    return std::pair(item.segment, item.first_head / group);
  };
  std::vector<std::pair<int32_t, int32_t>> groups;
  std::vector<int64_t> first_costs;
  for (std::size_t i = 0; i < plan.items.size(); ++i) {
    if (i > 0 && keys_of(plan.items[i]) == groups.back()) {
      EXPECT_LE(plan.item_costs[i], plan.item_costs[i - 1]);
      continue;
    }
    groups.push_back(keys_of(plan.items[i]));
    first_costs.push_back(plan.item_costs[i]);
  }
  EXPECT_EQ(groups.size(), 3U * 2) << "a group came back";
  EXPECT_TRUE(std::is_sorted(first_costs.rbegin(), first_costs.rend()));
}

/// Without packing, the costs of a plan are its visible pairs.
int64_t visible_pairs(const AttentionBatch& batch) {
  int64_t pairs = 0;
  for (const AttentionSegment& segment : batch.segments) {
    for (int64_t i = 0; i < segment.q_len; ++i) {
      const int64_t p = segment.first_position + i * segment.position_step;
      for (int64_t j = 0; j < segment.kv_len; ++j)
        pairs += p - segment.left <= j && j <= p + segment.right;
    }
  }
  return pairs * batch.shape.num_heads;
}

TEST(PlanAttention, CostsAreVisiblePairsPlusPacking) {
  for (int64_t left : {int64_t{0}, int64_t{5}, kUnboundedKeys}) {
    for (int64_t right : {int64_t{0}, int64_t{3}, kUnboundedKeys}) {
      for (int64_t step : {1, 4}) {
        for (int64_t first : {-7, 0, 20}) {
          AttentionBatch batch = batch_of({19}, {31});
          batch.segments[0].position_step = step;
          batch.segments[0].first_position = first;
          batch.segments[0].left = left;
          batch.segments[0].right = right;
          const AttentionPlan plan = plan_attention("test", batch, 0);
          const int64_t total =
              std::accumulate(plan.item_costs.begin(), plan.item_costs.end(), int64_t{0});
          const int64_t last = first + 18 * step;
          int64_t span = 0;
          for (int64_t j = 0; j < 31; ++j) span += first - left <= j && j <= last + right;
          const int64_t packing = 12 * span * static_cast<int64_t>(plan.items.size());
          EXPECT_EQ(total, visible_pairs(batch) + packing) << left << ' ' << right << ' ' << step;
        }
      }
    }
  }
}

TEST(PlanAttention, RangesOfKeysAscendWithinTheirSequence) {
  AttentionBatch batch = batch_of({2, 1}, {10, 5});
  const auto refusal = [&](const std::vector<int64_t>& ranges) {
    return message_of([&] { set_key_ranges("test", ranges, batch); });
  };
  EXPECT_EQ(
      refusal({0, 3, 1}),
      "test: key_ranges must have a begin and an end for each of 3 tokens, got 3 ints"
  );
  for (const auto& [ranges, where] : std::vector<std::pair<std::vector<int64_t>, std::string>>{
           {{1, 3, 0, 4, 0, 5}, "10] and ascend within a sequence, got 0 to 4 for token 1 after 1"},
           {{0, 3, 0, 2, 0, 5}, "10] and ascend within a sequence, got 0 to 2 for token 1 after 0"},
           {{0, 3, 4, 3, 0, 5}, "10] and ascend within a sequence, got 4 to 3 for token 1 after 0"},
           {{0, 3, 0, 4, 0, 6}, "5] and ascend within a sequence, got 0 to 6 for token 2 after 0"},
       }) {
    EXPECT_EQ(refusal(ranges).find("test: key_ranges must lie in [0, kv_len = " + where), 0U);
  }
  EXPECT_TRUE(batch.key_ranges.empty());
  set_key_ranges("test", Ints{2, 3, 2, 10, 0, 5}, batch);
  EXPECT_EQ(batch.key_ranges, (std::vector<int32_t>{2, 3, 2, 10, 0, 5}));
  Ints lens;
  batch.pages =
      page_table_from_csr("test", Ints{0, 1, 2}, Ints{4, 3}, Ints{10, 5}, 16, 1 << 20, lens);
  const AttentionPlan plan = plan_attention("test", batch, 0);
  EXPECT_EQ(plan_of(state_of(plan)), plan);
}

TEST(PlanAttention, IsAValue) {
  const AttentionBatch batch = batch_of({10, 20}, {10, 50});
  EXPECT_EQ(plan_attention("test", batch, 2), plan_attention("test", batch, 2));
  EXPECT_NE(plan_attention("test", batch, 2), plan_attention("test", batch_of({10}, {10}), 2));
}

TEST(PlanAttention, RefusesShapesOutsideItsBounds) {
  const auto plan_with = [](AttentionShape shape) {
    AttentionBatch batch = batch_of({1}, {1});
    batch.shape = shape;
    return plan_attention("test", batch, 0);
  };
  EXPECT_THROW(plan_with({8, 3, 64, 64}), std::invalid_argument);
  EXPECT_THROW(plan_with({0, 1, 64, 64}), std::invalid_argument);
  EXPECT_THROW(plan_with({8, 0, 64, 64}), std::invalid_argument);
  EXPECT_THROW(plan_with({8, 2, 577, 64}), std::invalid_argument);
  EXPECT_THROW(plan_with({8, 2, 0, 64}), std::invalid_argument);
  EXPECT_NO_THROW(plan_with({1, 1, 1, 16}));
  EXPECT_THROW(plan_attention("test", batch_of({1}, {1}), -1), std::invalid_argument);
  EXPECT_EQ(plan_attention("test", batch_of({1}, {1}), 3).num_threads, 3);
  EXPECT_THROW(plan_with({8, 2, 64, 592}), std::invalid_argument);
  EXPECT_NO_THROW(plan_with({128, 1, 576, 512}));
}

}  // namespace
}  // namespace cpattn
