// SPDX-License-Identifier: Apache-2.0
#include "cpattn/sparse/block_selection.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "testing.h"

namespace cpattn {
namespace {

using testing::view;

constexpr float kEndless = std::numeric_limits<float>::infinity();

struct Selected {
  std::vector<int32_t> blocks;
  std::vector<float> scores;

  bool operator==(const Selected&) const = default;
};

/// One row of a table.
IndexTable table(const std::vector<int32_t>& blocks) {
  const auto columns = static_cast<int64_t>(blocks.size());
  return {.data = blocks.data(), .rows = 1, .columns = columns, .row_stride = columns};
}

/// One query, its blocks sorted by score.
struct Query {
  std::vector<float> score;
  int64_t length, block_size, topk, init_blocks, local_blocks;

  Selected expected() const {
    const int64_t count = (length + block_size - 1) / block_size;
    std::vector<float> best(count, -kEndless);
    for (int64_t key = 0; key < length; ++key) {
      if (!std::isnan(score[key])) {
        best[key / block_size] = std::max(best[key / block_size], score[key]);
      }
    }
    for (int64_t b = 0; b < count; ++b) {
      if (b < init_blocks || b >= count - local_blocks) best[b] = kEndless;
    }
    std::vector<int32_t> order(count);
    std::iota(order.begin(), order.end(), 0);
    std::erase_if(order, [&](int32_t b) { return best[b] == -kEndless; });
    std::ranges::stable_sort(order, [&](int32_t a, int32_t b) { return best[a] > best[b]; });
    order.resize(std::min<std::size_t>(order.size(), topk));
    std::ranges::sort(order);
    Selected selected{.blocks = order, .scores = {}};
    for (int32_t b : order) selected.scores.push_back(best[b]);
    selected.blocks.resize(topk, -1);
    selected.scores.resize(topk, -kEndless);
    return selected;
  }

  /// The keys of a rank, and what is selected of them.
  Selected of_rank(int64_t rank, int64_t size) const {
    std::vector<float> own;
    for (int64_t key = 0; key < static_cast<int64_t>(score.size()); ++key) {
      if (key / block_size % size == rank) own.push_back(score[key]);
    }
    const std::vector<int64_t> lengths = {length};
    Selected selected{.blocks = std::vector<int32_t>(topk), .scores = std::vector<float>(topk)};
    const auto columns = static_cast<int64_t>(own.size());
    select_blocks({
        .function = "test",
        .score = view(own, DType::float32, {1, columns}),
        .lengths = lengths,
        .topk = topk,
        .block_size = block_size,
        .init_blocks = init_blocks,
        .local_blocks = local_blocks,
        .dcp_rank = rank,
        .dcp_size = size,
        .blocks = view(selected.blocks, DType::int32, {1, topk}),
        .block_scores = view(selected.scores, DType::float32, {1, topk}),
    });
    return selected;
  }

  Selected of_ranks(int64_t size) const {
    Selected parts, selected{std::vector<int32_t>(topk), std::vector<float>(topk)};
    for (int64_t rank = 0; rank < size; ++rank) {
      const Selected own = of_rank(rank, size);
      parts.blocks.insert(parts.blocks.end(), own.blocks.begin(), own.blocks.end());
      parts.scores.insert(parts.scores.end(), own.scores.begin(), own.scores.end());
    }
    merge_blocks({
        .function = "test",
        .blocks = table(parts.blocks),
        .block_scores = view(parts.scores, DType::float32, {1, topk * size}),
        .topk = topk,
        .out_blocks = view(selected.blocks, DType::int32, {1, topk}),
        .out_scores = view(selected.scores, DType::float32, {1, topk}),
    });
    return selected;
  }
};

class BlockSelectionRows : public testing::EveryIsa {};

TEST_P(BlockSelectionRows, RanksTogetherSelectWhatOneAloneDoes) {
  std::mt19937 random(7);
  const auto upto = [&random](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random);
  };
  for (int round = 0; round < 300; ++round) {
    const int64_t topk = upto(1, 6), init = upto(0, topk), block = upto(1, 150);
    Query query{
        .score = std::vector<float>(upto(1, 1500)),
        .length = 0,
        .block_size = block,
        .topk = topk,
        .init_blocks = init,
        .local_blocks = upto(0, topk - init),
    };
    query.length = upto(0, static_cast<int64_t>(query.score.size()));
    const float special[] = {-kEndless, std::nanf(""), kEndless};
    for (float& score : query.score) {
      const int64_t kind = upto(0, 60);
      score = kind < 3 ? special[kind] : static_cast<float>(upto(-20, 20));  // many ties
    }
    ASSERT_EQ(query.of_rank(0, 1), query.expected()) << "round " << round;
    ASSERT_EQ(query.of_ranks(upto(1, 4)), query.expected()) << "round " << round;
  }
}

TEST(BlockSelection, ABlockThatIsThereTwiceCountsOnce) {
  std::vector<int32_t> blocks = {5, 2, 5, -1}, merged(2);
  std::vector<float> scores = {1, 2, 3, 9}, merged_scores(2);
  merge_blocks({
      .function = "test",
      .blocks = table(blocks),
      .block_scores = view(scores, DType::float32, {1, 4}),
      .topk = 2,
      .out_blocks = view(merged, DType::int32, {1, 2}),
      .out_scores = view(merged_scores, DType::float32, {1, 2}),
  });
  EXPECT_EQ(merged, (std::vector<int32_t>{2, 5}));
  EXPECT_EQ(merged_scores, (std::vector<float>{2, 3}));
}

INSTANTIATE_TEST_SUITE_P(
    Isa, BlockSelectionRows, ::testing::ValuesIn(supported_isas()), testing::isa_test_name
);

}  // namespace
}  // namespace cpattn
