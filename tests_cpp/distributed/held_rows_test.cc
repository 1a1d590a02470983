// SPDX-License-Identifier: Apache-2.0
#include "cpattn/distributed/held_rows.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "cpattn/distributed/key_scratch.h"

namespace cpattn {
namespace {

using Lens = std::vector<int64_t>;

/// Requests with 9 and 5 keys, 4 of each new, and a request without new ones; two padding tokens.
/// Pages of 4 slots are dealt out to two ranks, which compute 5 tokens each.
struct HeldBatch {
  std::shared_ptr<const BatchPages> pages = std::make_shared<BatchPages>(BatchPages{
      .page_size = 4, .kv_lens = {9, 3, 5}, .indptr = {0, 3, 4, 6}, .ids = {4, 1, 7, 0, 3, 2}
  });
  std::shared_ptr<const BatchKeys> keys =
      std::make_shared<BatchKeys>(pages, Interleave{.shard_size = 2, .run_len = 4});
  Lens q_lens = {4, 0, 4}, rows_per_rank = {5, 5};
  NewTokens tokens{.q_lens = q_lens, .padding = 2};
  TokenRows rows = token_rows(*pages, tokens, std::nullopt);

  int64_t owner(int64_t request, int64_t position) const {
    return pages->slot(request, position) / 4 % 2;
  }
  bool is_new(int64_t request, int64_t position) const {
    return position >= pages->kv_lens[request] - q_lens[request];
  }
};

TEST(HeldRows, AreThoseOfEachKey) {
  const HeldBatch b;
  EXPECT_EQ(first_seen(*b.pages, b.tokens, std::nullopt), (Lens{0, 3, 0}));
  for (const auto& window : {std::optional<int64_t>(), std::optional<int64_t>(2)}) {
    const Lens first = first_seen(*b.pages, b.tokens, window);
    EXPECT_EQ(first, window ? (Lens{3, 3, 0}) : (Lens{0, 3, 0}));
    Lens owners, keys(2), seen(2), fresh(2), arriving(2);
    for (int64_t request = 0; request < 3; ++request) {
      for (int64_t position = 0; position < b.pages->kv_lens[request]; ++position) {
        const int64_t rank = b.owner(request, position);
        ++keys[rank];
        seen[rank] += position >= first[request] ? 1 : 0;
        fresh[rank] += b.is_new(request, position) ? 1 : 0;
      }
    }
    for (std::size_t row = 0; row < b.rows.request.size(); ++row) {
      const int64_t request = b.rows.request[row], position = b.rows.position[row];
      owners.push_back(position < b.pages->kv_lens[request] ? b.owner(request, position) : -1);
      if (owners.back() >= 0 && owners.back() != (row < 5 ? 0 : 1)) ++arriving[owners.back()];
    }
    const HeldRows held = held_rows(b.keys, b.tokens, b.rows_per_rank, owners, window);
    EXPECT_EQ(held.tokens, b.rows_per_rank);
    EXPECT_EQ(held.keys, keys);
    EXPECT_EQ(held.seen, seen);
    EXPECT_EQ(held.new_keys, fresh);
    EXPECT_EQ(held.arriving, arriving);
  }
}

TEST(KeyScratch, HasEachKeyOfAPartOnceAtItsPosition) {
  const HeldBatch b;
  for (const KeyPart& part : {
           KeyPart{.cached = true, .new_in_pools = true},
           KeyPart{.cached = true, .new_rows = true},
           KeyPart{.new_in_pools = true},
       }) {
    const KeyScratch scratch =
        plan_key_scratch(b.keys, b.tokens, b.rows, b.rows_per_rank, part, std::nullopt);
    EXPECT_EQ(scratch.num_slots, 6 * 4);
    EXPECT_EQ(scratch.block_tables.values, (std::vector<int32_t>{0, 1, 2, 3, -1, -1, 4, 5, -1}));
    const Lens begins = {0, 12, 16};
    std::size_t next = 0, next_new = 0;
    for (int64_t rank = 0; rank < 2; ++rank) {
      Lens expected;
      for (int64_t request = 0; request < 3; ++request) {
        for (int64_t position = 0; position < b.pages->kv_lens[request]; ++position) {
          const bool is_sent = b.is_new(request, position) ? part.new_in_pools : part.cached;
          const bool is_seen = request != 1;  // which has no queries
          if (!is_sent || !is_seen || b.owner(request, position) != rank) continue;
          const int64_t slot = b.pages->slot(request, position);
          expected.push_back(slot / 8 * 4 + slot % 4);
          EXPECT_EQ(scratch.slots[next++], begins[request] + position);
        }
      }
      EXPECT_EQ(scratch.sent_rows[rank], expected);
      for (int64_t row = rank * 5; part.new_rows && row < rank * 5 + 5; ++row) {
        const int64_t request = b.rows.request[row], position = b.rows.position[row];
        const bool is_padding = position >= b.pages->kv_lens[request];
        EXPECT_EQ(scratch.new_rows[next_new++], static_cast<int64_t>(next));
        EXPECT_EQ(scratch.slots[next++], is_padding ? -1 : begins[request] + position);
      }
    }
    EXPECT_EQ(next, scratch.slots.size());
    EXPECT_EQ(next_new, scratch.new_rows.size());
  }
}

}  // namespace
}  // namespace cpattn
