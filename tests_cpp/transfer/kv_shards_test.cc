// SPDX-License-Identifier: Apache-2.0
#include "cpattn/transfer/kv_shards.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "testing.h"

namespace cpattn {
namespace {

using testing::message_of;
using Ints = std::vector<int64_t>;

TEST(GetLayerShardRange, EveryLayerHasOneOwner) {
  for (int64_t total = 0; total <= 20; ++total) {
    for (int64_t size = 1; size <= 8; ++size) {
      int64_t next = 0;
      for (int64_t rank = 0; rank < size; ++rank) {
        const IndexRange layers = get_layer_shard_range(rank, size, total);
        EXPECT_EQ(layers.begin, next);
        EXPECT_EQ(layers.size(), total / size + (rank < total % size));
        for (int64_t layer = layers.begin; layer < layers.end; ++layer) {
          EXPECT_EQ(get_layer_owner(layer, size, total), rank);
        }
        next = layers.end;
      }
      EXPECT_EQ(next, total);
    }
  }
}

TEST(GetLayerShardRange, EndsOfInt64) {
  EXPECT_EQ(get_layer_shard_range(1, 2, INT64_MAX), (IndexRange{INT64_MAX / 2 + 1, INT64_MAX}));
  EXPECT_EQ(get_layer_owner(INT64_MAX - 1, 2, INT64_MAX), 1);
  EXPECT_EQ(get_layer_owner(0, INT64_MAX, 1), 0);
}

TEST(GetLayerOwner, OfAsManyLayersAsThereCanBe) {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  EXPECT_EQ(get_layer_owner(kMost - 1, 1, kMost), 0);
  EXPECT_EQ(get_layer_owner(kMost - 1, 2, kMost), 1);
  EXPECT_EQ(get_layer_owner(kMost - 1, kMost, kMost), kMost - 1);
}

TEST(GetLayerOwner, OutsideOfTheStage) {
  const auto message = [](int64_t layer, int64_t size, int64_t total) {
    return message_of([&] { get_layer_owner(layer, size, total); });
  };
  const std::string rule = "get_layer_owner: local_layer_idx must be in [0, 7) of total_layers, ";
  EXPECT_EQ(message(7, 3, 7), rule + "got 7");
  EXPECT_EQ(message(-1, 3, 7), rule + "got -1");
  EXPECT_EQ(message(0, 0, 7), "get_layer_owner: shard_size must be >= 1, got 0");
  EXPECT_EQ(message(0, 1, -1), "get_layer_owner: total_layers must be >= 0, got -1");
}

TEST(FilterKvIndicesForShardRank, EveryPageGoesToItsOwner) {
  std::mt19937 random(5);
  for (int repeat = 0; repeat < 500; ++repeat) {
    const int64_t size = 1 + random() % 6, start = random() % 5;
    Ints pages(random() % 20);
    for (int64_t& page : pages) page = random() % 100;
    const IndexRange chunk = {start, start + std::ssize(pages)};
    std::vector<bool> sent(pages.size());
    for (int64_t rank = 0; rank < size; ++rank) {
      const KVShardPages owned = filter_kv_indices_for_shard_rank(pages, chunk, rank, size);
      ASSERT_EQ(owned.pages.size(), owned.positions.size());
      for (std::size_t i = 0; i < owned.pages.size(); ++i) {
        const int64_t position = owned.positions[i] - start;
        EXPECT_EQ(owned.pages[i] * size + rank, pages.at(position));
        EXPECT_FALSE(sent.at(position));
        EXPECT_TRUE(i == 0 || owned.positions[i] > owned.positions[i - 1]);
        sent.at(position) = true;
      }
    }
    EXPECT_EQ(std::ranges::count(sent, true), std::ssize(pages));
  }
}

TEST(FilterKvIndicesForShardRank, Refusals) {
  const auto message = [](const Ints& pages, IndexRange chunk, int64_t rank, int64_t size) {
    return message_of([&] { filter_kv_indices_for_shard_rank(pages, chunk, rank, size); });
  };
  const std::string name = "filter_kv_indices_for_shard_rank: ";
  EXPECT_EQ(message({4, 5}, {3, 5}, 1, 2), "no error");
  EXPECT_EQ(
      message({4, 5}, {3, 6}, 1, 2),
      name + "kv_indices must be the 3 pages of index_slice [3, 6), got 2"
  );
  EXPECT_EQ(message({4, -5}, {3, 5}, 1, 2), name + "kv_indices must be >= 0, got -5 at index 1");
  EXPECT_EQ(
      message({}, {3, 2}, 0, 2), name + "index_slice must have 0 <= start <= stop, got [3, 2)"
  );
  EXPECT_EQ(
      message({}, {-1, 0}, 0, 2), name + "index_slice must have 0 <= start <= stop, got [-1, 0)"
  );
  EXPECT_EQ(message({}, {0, 0}, 2, 2), name + "shard_rank must be in [0, 2) of shard_size, got 2");
  EXPECT_EQ(
      message({}, {0, 0}, -1, 2), name + "shard_rank must be in [0, 2) of shard_size, got -1"
  );
  EXPECT_EQ(message({}, {0, 0}, 0, 0), name + "shard_size must be >= 1, got 0");
  const Ints wide = {int64_t{1} << 33};
  EXPECT_EQ(message(wide, {0, 1}, 0, 2), name + "local pages must fit into int32, got 4294967296");
}

TEST(FilterKvIndicesForCpRank, SharesOfTheTransferWithinTheChunk) {
  const auto share = [](int64_t start, int64_t end, int64_t total, int64_t rank, int64_t size) {
    return filter_kv_indices_for_cp_rank(end - start, start, end, total, rank, size);
  };
  EXPECT_EQ(share(2, 5, 5, 0, 3), (IndexRange{0, 0})) << "pages 0 and 1";
  EXPECT_EQ(share(2, 5, 5, 1, 3), (IndexRange{0, 2})) << "pages 2 and 3";
  EXPECT_EQ(share(2, 5, 5, 2, 3), (IndexRange{2, 3})) << "page 4";
  EXPECT_EQ(share(2, 5, 3, 1, 2), (IndexRange{0, 1})) << "pages 3 and 4 are nobody's";
  EXPECT_EQ(filter_kv_indices_for_cp_rank(9, 2, {}, 5, 1, 2), (IndexRange{1, 3}));
  EXPECT_EQ(filter_kv_indices_for_cp_rank(1, 7, {}, 5, 1, 2), (IndexRange{0, 0}));
}

TEST(FilterKvIndicesForCpRank, Refusals) {
  const auto message = [](int64_t num, int64_t start, std::optional<int64_t> end, int64_t total) {
    return message_of([&] { filter_kv_indices_for_cp_rank(num, start, end, total, 1, 2); });
  };
  const std::string name = "filter_kv_indices_for_cp_rank: ";
  EXPECT_EQ(message(2, 1, 3, 9), "no error");
  EXPECT_EQ(
      message(3, 1, 3, 9), name + "kv_indices must be the 2 pages of index_slice [1, 3), got 3"
  );
  EXPECT_EQ(
      message(1, 1, {}, 9), name + "kv_indices must be the 8 pages of index_slice [1, 9), got 1"
  );
  EXPECT_EQ(message(0, 1, 3, -1), name + "total_pages must be >= 0, got -1");
  EXPECT_EQ(message(0, 3, 1, 9), name + "index_slice must have 0 <= start <= stop, got [3, 1)");
  EXPECT_EQ(message(0, -3, 1, 9), name + "index_slice must have 0 <= start <= stop, got [-3, 1)");
  EXPECT_EQ(
      message_of([] { filter_kv_indices_for_cp_rank(0, 0, 0, 0, 2, 2); }),
      name + "attn_cp_rank must be in [0, 2) of attn_cp_size, got 2"
  );
}

}  // namespace
}  // namespace cpattn
