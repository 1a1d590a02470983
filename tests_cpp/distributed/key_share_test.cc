// SPDX-License-Identifier: Apache-2.0
#include "cpattn/distributed/key_share.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "cpattn/distributed/batch_pages.h"
#include "testing.h"

namespace cpattn {
namespace {

using Ints = std::vector<int64_t>;
using testing::message_of;

IndexTable table_of(const Ints& values, int64_t rows) {
  const int64_t columns = std::ssize(values) / rows;
  return {
      .data = values.data(),
      .is_int64 = true,
      .rows = rows,
      .columns = columns,
      .row_stride = columns,
  };
}

std::shared_ptr<const BatchPages> pages_of(const Ints& table, const Ints& lens, int64_t page_size) {
  const IndexTable view = table_of(table, std::ssize(lens));
  return std::make_shared<BatchPages>(read_batch_pages("f", view, lens, page_size));
}

/// Pages in any order for requests of these lengths.
std::shared_ptr<const BatchPages> shuffled_pages(
    const Ints& lens, int64_t page_size, std::mt19937_64& random
) {
  int64_t columns = 1;
  for (const int64_t len : lens) columns = std::max(columns, (len + page_size - 1) / page_size);
  Ints table(columns * lens.size());
  std::iota(table.begin(), table.end(), 0);
  std::shuffle(table.begin(), table.end(), random);
  return pages_of(table, lens, page_size);
}

struct Key {
  int64_t position, owner, row;
};

/// The keys of a request, one by one, as the header of placements has them.
std::vector<Key> keys_of(const BatchPages& pages, int64_t request, const Interleave& interleave) {
  const auto [size, run] = interleave;
  std::vector<Key> keys;
  for (int64_t p = 0; p < pages.kv_lens[request]; ++p) {
    const int64_t slot = pages.slot(request, p);
    keys.push_back({p, slot / run % size, slot / run / size * run + slot % run});
  }
  return keys;
}

/// Compares a share of one rank with the keys that it holds, listed one by one.
void expect_share(const KeyShare& share, int64_t rank, const Interleave& interleave) {
  const BatchPages& pages = share.keys().pages();
  const LocalKeys local = share.local_keys();
  const LocalPages local_pages = share.local_pages();
  ASSERT_EQ(pages.page_size % local_pages.page_size, 0);
  std::size_t next = 0;
  for (int64_t i = 0; i < pages.bs(); ++i) {
    int64_t count = 0;
    for (const auto& [position, owner, row] : keys_of(pages, i, interleave)) {
      ASSERT_EQ(share.count_below(i, position), count);
      ASSERT_EQ(share.row_of(i, position), owner == rank ? row : -1);
      if (owner != rank) continue;
      const int64_t id = local_pages.ids[local_pages.indptr[i] + count / local_pages.page_size];
      ASSERT_EQ(id * local_pages.page_size + count % local_pages.page_size, row);
      ASSERT_EQ(local.request[next], i);
      ASSERT_EQ(local.position[next], position);
      ASSERT_EQ(local.row[next++], row);
      ++count;
    }
    ASSERT_EQ(share.count(i), count);
  }
  ASSERT_EQ(next, local.row.size());
}

TEST(KeyShare, AnInterleaveIsCountedAsItsKeysOneByOne) {
  std::mt19937_64 random(7);
  const auto below = [&random](int64_t bound) {
    return std::uniform_int_distribution<int64_t>(0, bound - 1)(random);
  };
  for (int round = 0; round < 300; ++round) {
    const Interleave interleave{1 + below(9), 1 + below(12)};
    const int64_t page_size = 1 + below(40);
    const auto pages = shuffled_pages({below(90), 0, below(200)}, page_size, random);
    const auto keys = std::make_shared<BatchKeys>(pages, interleave);
    for (int64_t rank = 0; rank < interleave.shard_size; ++rank) {
      expect_share(KeyShare(keys, {rank}), rank, interleave);
    }
  }
}

TEST(KeyShare, PlacedSlotsAreThoseOfTheInterleaveThatPlacedThem) {
  std::mt19937_64 random(11);
  for (const int64_t page_size : {1, 4, 6, 16}) {
    for (const Interleave interleave : {Interleave{3, 2}, Interleave{2, 16}, Interleave{1, 5}}) {
      const auto pages = shuffled_pages({35, 8}, page_size, random);
      Ints ids(pages->ids.begin(), pages->ids.end()), owners, rows;
      std::sort(ids.begin(), ids.end());
      const auto [size, run] = interleave;
      for (const int64_t page : ids) {
        for (int64_t slot = page * page_size; slot < (page + 1) * page_size; ++slot) {
          owners.push_back(slot / run % size);
          rows.push_back(slot / run / size * run + slot % run);
        }
      }
      const PlacedSlots placed{.pages = ids, .owners = owners, .rows = rows};
      const auto keys = std::make_shared<BatchKeys>(pages, size, placed);
      EXPECT_GE(keys->run_len(), std::gcd(page_size, run));
      for (int64_t rank = 0; rank < size; ++rank) {
        expect_share(KeyShare(keys, {rank}), rank, interleave);
      }
    }
  }
}

TEST(KeyShare, AGroupHasTheKeysOfItsRanks) {
  std::mt19937_64 random(5);
  for (const int64_t run : {1, 3, 8, 16}) {
    const Interleave interleave{4, run};
    const auto keys = std::make_shared<BatchKeys>(shuffled_pages({77, 12}, 8, random), interleave);
    const KeyShare both(keys, {1, 3}), one(keys, {1}), other(keys, {3}), none(keys, {});
    for (int64_t i = 0; i < 2; ++i) {
      for (int64_t p = 0; p <= keys->pages().kv_lens[i]; ++p) {
        EXPECT_EQ(both.count_below(i, p), one.count_below(i, p) + other.count_below(i, p));
        EXPECT_EQ(none.count_below(i, p), 0);
      }
    }
    const LocalKeys local = both.local_keys();
    EXPECT_EQ(std::ssize(local.row), both.count(0) + both.count(1));
    for (std::size_t k = 1; k < local.row.size(); ++k) {
      EXPECT_TRUE(
          local.request[k - 1] < local.request[k] || local.position[k - 1] < local.position[k]
      );
    }
  }
}

TEST(KeyShare, PagesAreAsLargeAsRowsLieTogether) {
  const Ints ordered{4, 5, 6, 7}, apart{4, 6, 5, 7};
  const auto page_size = [](const Ints& table, Interleave interleave) {
    const auto keys = std::make_shared<BatchKeys>(pages_of(table, {64}, 16), interleave);
    return KeyShare(keys, {0}).local_pages().page_size;
  };
  EXPECT_EQ(page_size(apart, {8, 1}), 2);      // of each page two tokens
  EXPECT_EQ(page_size(ordered, {8, 1}), 8);    // of four pages in a row
  EXPECT_EQ(page_size(ordered, {2, 16}), 16);  // whole pages
  EXPECT_EQ(page_size(apart, {3, 1}), 1);      // of each page five tokens, or six
}

TEST(KeyShare, Refusals) {
  const auto pages = pages_of({3, 1}, {7}, 4);
  const auto keys = std::make_shared<BatchKeys>(pages, Interleave{2, 1});
  EXPECT_EQ(
      message_of([&] { KeyShare(keys, {1, 1}); }),
      "KeyShare: ranks must be ascending and in [0, 2), got 1"
  );
  EXPECT_EQ(
      message_of([&] { KeyShare(keys, {2}); }),
      "KeyShare: ranks must be ascending and in [0, 2), got 2"
  );
  EXPECT_EQ(
      message_of([&] { static_cast<void>(KeyShare(keys, {0, 1}).local_pages()); }),
      "KeyShare: local_pages is of one rank, got 2"
  );
  const Ints zeros(8), ids{1, 3}, others{1, 2}, bad{0, 0, 2, 0, 0, 0, 0, 0},
      low{0, 0, 0, -1, 0, 0, 0, 0};
  const auto placed = [&](const Ints& at, const Ints& owners, const Ints& rows) {
    return message_of([&] { BatchKeys(pages, 2, {at, owners, rows}); });
  };
  EXPECT_EQ(placed(ids, zeros, zeros), "no error");
  EXPECT_EQ(placed(others, zeros, zeros), "BatchKeys: pages must be ascending, with page 3");
  EXPECT_EQ(placed(ids, bad, zeros), "BatchKeys: owners must be in [0, 2), got 2 at index 2");
  EXPECT_EQ(
      placed(ids, zeros, low), "BatchKeys: rows must be >= 0 and fit int64, got -1 at index 3"
  );
  EXPECT_EQ(
      placed(ids, zeros, {}),
      "BatchKeys: owners and rows must have each of the 8 slots of pages, got 8 and 0"
  );
}

}  // namespace
}  // namespace cpattn
