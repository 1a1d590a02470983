// SPDX-License-Identifier: Apache-2.0
#include "cpattn/kv/shard_gather.h"

#include <gtest/gtest.h>

#include <optional>
#include <random>
#include <set>
#include <vector>

#include "cpattn/kv/striped_allocator.h"
#include "testing.h"

namespace cpattn {
namespace {

using Ints = std::vector<int64_t>;
using testing::message_of;

IndexTable table_of(const Ints& slots, int64_t rows) {
  const auto columns = static_cast<int64_t>(slots.size()) / rows;
  return {
      .data = slots.data(),
      .is_int64 = true,
      .rows = rows,
      .columns = columns,
      .row_stride = columns
  };
}

ShardScratch scratch_of(int64_t shard_size, int64_t page_size) {
  return {
      .placement = {shard_size, page_size},
      .size = 40 * page_size,
      .max_prefix_tokens = 12 * shard_size * page_size,
      .chunk_tokens = 20 * page_size,
  };
}

TEST(ShardGather, BlocksOfRanksThenNewPages) {
  // Two requests that share pages 2 and 3, and go on with 4 and with 6.
  const Ints slots = {4, 5, 6, 7, 8, 9, 4, 5, 6, 7, 12, 13}, prefixes = {4, 4}, lens = {6, 5};
  const ShardScratch scratch{
      .placement = {2, 2}, .size = 6, .max_prefix_tokens = 8, .chunk_tokens = 6
  };
  const ShardBatch batch{
      .req_to_token = table_of(slots, 2),
      .req_pool_indices = {},
      .prefix_lens = prefixes,
      .seq_lens = lens
  };
  const ShardGatherPlan plan = plan_shard_gather(scratch, batch);
  using Pages32 = ShardGatherPlan::Ints;
  EXPECT_EQ(plan.block_pages, 2);
  EXPECT_EQ(plan.send_pages, (Pages32{1, 0, 1, 0}));
  EXPECT_EQ(plan.prefix_pages, (Pages32{2, 3}));
  EXPECT_EQ(plan.chunk_pages, (Pages32{4, 6}));
  EXPECT_EQ(plan.page_pos, (Pages32{7, 7, 0, 2, 4, 7, 5, 7}));
  const Ints pool = {4, 7, 9, 12, 0, -1};
  Ints rows(pool.size());
  translate_slots(plan, pool, rows);
  EXPECT_EQ(rows, (Ints{0, 5, 9, 10, 14, -1}));
  EXPECT_EQ(plan_shard_write(plan, pool, 0), (LocalShare{{0, 2, 3, 4}, {2, 5, 6, 0}}));
  EXPECT_EQ(plan_shard_write(plan, pool, 1), (LocalShare{{1}, {3}}));
}

TEST(ShardGather, EveryPageHasAPlaceOfItsOwn) {
  std::mt19937_64 random(3);
  const auto below = [&random](int64_t bound) {
    return std::uniform_int_distribution<int64_t>(0, bound - 1)(random);
  };
  for (int round = 0; round < 200; ++round) {
    const ShardScratch scratch = scratch_of(2 + below(4), 1 + below(3));
    const int64_t ps = scratch.page_size();
    StripedAllocator allocator(
        {.size = scratch.size, .page_size = ps, .shard_size = scratch.placement.shard_size}
    );
    const int64_t bs = below(4), columns = 12 * ps;
    Ints slots, prefixes, lens;
    std::set<int64_t> prefix_pages, chunk_pages;
    for (int64_t i = 0; i < bs; ++i) {
      prefixes.push_back(below(7) * ps);
      lens.push_back(prefixes.back() + below(5 * ps + 1));
      Ints row = allocator.alloc_cyclic(below(9), columns).value();
      slots.insert(slots.end(), row.begin(), row.end());
      for (int64_t token = 0; token < lens[i]; ++token) {
        (token < prefixes[i] ? prefix_pages : chunk_pages).insert(row[token] / ps);
      }
    }
    ShardBatch batch{
        .req_to_token = {}, .req_pool_indices = {}, .prefix_lens = prefixes, .seq_lens = lens
    };
    if (bs > 0) batch.req_to_token = table_of(slots, bs);
    const ShardGatherPlan plan = plan_shard_gather(scratch, batch);
    std::set<int32_t> places;
    for (std::size_t page = 0; page < plan.page_pos.size(); ++page) {
      const int32_t place = plan.page_pos[page];
      if (place == scratch.trash_page()) continue;
      EXPECT_TRUE(places.insert(place).second);
      const auto logical = static_cast<int64_t>(page);
      const bool is_chunk = place >= scratch.chunk_page();
      EXPECT_TRUE((is_chunk ? chunk_pages : prefix_pages).contains(logical));
      if (is_chunk) continue;
      const int64_t rank = logical % scratch.placement.shard_size;
      EXPECT_EQ(place / plan.block_pages, rank);
      EXPECT_EQ(plan.send_pages[place], logical / scratch.placement.shard_size);
    }
    EXPECT_EQ(places.size(), prefix_pages.size() + chunk_pages.size());
    const Ints gathered(plan.prefix_pages.begin(), plan.prefix_pages.end());
    const Ints written(plan.chunk_pages.begin(), plan.chunk_pages.end());
    const ShardGatherPlan again =
        restore_shard_gather(scratch, plan.block_pages, gathered, written);
    EXPECT_EQ(again, plan);
    EXPECT_EQ(again.page_pos, plan.page_pos);
    EXPECT_EQ(again.send_pages, plan.send_pages);
  }
}

TEST(ShardGather, StatesOfNoPlanAreRefused) {
  const ShardScratch scratch{
      .placement = {2, 2}, .size = 6, .max_prefix_tokens = 8, .chunk_tokens = 4
  };
  const auto restore = [&](int64_t block_pages, const Ints& prefix_pages, const Ints& chunk_pages) {
    return message_of([&] {
      restore_shard_gather(scratch, block_pages, prefix_pages, chunk_pages);
    });
  };
  EXPECT_EQ(restore(2, {2, 4, 3}, {5, 6}), "no error");
  EXPECT_EQ(restore(-1, {}, {}), "plan_shard_gather: block_pages must be in [0, 2], got -1");
  EXPECT_EQ(restore(3, {}, {}), "plan_shard_gather: block_pages must be in [0, 2], got 3");
  EXPECT_EQ(
      restore(1, {2, 4}, {}),
      "plan_shard_gather: block_pages must be at least the prefix pages of a rank, 2, got 1"
  );
  EXPECT_EQ(
      restore(2, {3, 2}, {}), "plan_shard_gather: prefix_pages must ascend by rank, got 2 behind 3"
  );
  EXPECT_EQ(
      restore(2, {2, 2}, {}), "plan_shard_gather: prefix_pages must ascend by rank, got 2 behind 2"
  );
  EXPECT_EQ(restore(1, {1}, {}), "plan_shard_gather: prefix_pages must be in [2, 8), got 1");
  EXPECT_EQ(restore(1, {}, {8}), "plan_shard_gather: chunk_pages must be in [2, 8), got 8");
  EXPECT_EQ(restore(1, {2}, {2}), "plan_shard_gather: chunk_pages must occur once, got 2 again");
  EXPECT_EQ(
      restore(1, {}, {2, 3, 4}), "plan_shard_gather: chunk_pages must fit chunk_tokens, 4, got 3"
  );
}

}  // namespace
}  // namespace cpattn
