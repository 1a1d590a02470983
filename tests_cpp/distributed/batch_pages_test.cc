// SPDX-License-Identifier: Apache-2.0
#include "cpattn/distributed/batch_pages.h"

#include <gtest/gtest.h>

#include <set>
#include <vector>

#include "testing.h"

namespace cpattn {
namespace {

using Ints = std::vector<int64_t>;
using testing::message_of;

const Ints kTables{5, 3, 9, 2, 7, 0};  // page_size 4: 9 and 6 tokens have 3 and 2 pages
const Ints kLens{9, 6}, kNew{4, 6};

BatchPages read(const Ints& values, int64_t rows, const Ints& lens, int64_t page_size = 4) {
  const int64_t columns = rows > 0 ? std::ssize(values) / rows : 0;
  const IndexTable table{
      .data = values.data(),
      .is_int64 = true,
      .rows = rows,
      .columns = columns,
      .row_stride = columns,
  };
  return read_batch_pages("f", table, lens, page_size);
}

TEST(BatchPages, PagesBehindTheLastOneAreNotRead) {
  const BatchPages pages = read(kTables, 2, kLens);
  EXPECT_EQ(pages.ids, (std::vector<int32_t>{5, 3, 9, 2, 7}));
  EXPECT_EQ(pages.indptr, (Ints{0, 3, 5}));
  Ints unused = kTables;
  unused[5] = -9;
  EXPECT_EQ(digest_of(read(unused, 2, kLens).ids), digest_of(pages.ids));
  unused[4] = 8;
  EXPECT_NE(digest_of(read(unused, 2, kLens).ids), digest_of(pages.ids));
}

TEST(BatchPages, ATableRepeatsTheFirstPageForPadding) {
  const BatchPages pages = read(kTables, 2, kLens);
  EXPECT_EQ(padded_table(pages, 0).values, (std::vector<int32_t>{5, 3, 9, 2, 7, -1}));
  const PaddedTable padded = padded_table(pages, 10);
  EXPECT_EQ(padded.columns, 4);
  EXPECT_EQ(padded.values, (std::vector<int32_t>{5, 3, 9, -1, 2, 7, 2, 2}));
  EXPECT_EQ(padded_table(read({}, 1, {0}), 5).values, (std::vector<int32_t>{0, 0}));
}

TEST(BatchPages, NewTokensHaveTheSlotsOfTheirPositions) {
  const BatchPages pages = read(kTables, 2, kLens);
  const NewTokens tokens{.q_lens = kNew, .padding = 2};
  EXPECT_EQ(new_slots(pages, tokens), (Ints{13, 14, 15, 36, 8, 9, 10, 11, 28, 29, -1, -1}));
  const TokenRows in_order = token_rows(pages, tokens, std::nullopt);
  EXPECT_EQ(in_order.request, (Ints{0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1}));
  EXPECT_EQ(in_order.position, (Ints{5, 6, 7, 8, 0, 1, 2, 3, 4, 5, 6, 7}));
  const Ints rows{11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0};
  EXPECT_EQ(token_rows(pages, tokens, rows).position, (Ints{7, 6, 5, 4, 3, 2, 1, 0, 8, 7, 6, 5}));
}

TEST(BatchPages, Refusals) {
  const auto pages = [](const Ints& values, int64_t rows) {
    return message_of([&] { read(values, rows, kLens); });
  };
  const std::string shape = "f: block_tables must be [bs, >= ceil(max(seq_lens) / page_size)] = ";
  EXPECT_EQ(pages({5, 3, 2, 7}, 2), shape + "[2, >= 3], got shape [2, 2]");
  EXPECT_EQ(pages({5, 3, 9}, 1), shape + "[2, >= 3], got shape [1, 3]");
  const std::string ids = "f: block_tables must hold page ids, int32 and >= 0, got block_tables";
  EXPECT_EQ(pages({5, 3, 9, -1, 7, 0}, 2), ids + "[1, 0] = -1");
  EXPECT_EQ(pages({5, int64_t{1} << 31, 9, 2, 7, 0}, 2), ids + "[0, 1] = 2147483648");
  EXPECT_EQ(
      message_of([] { read(kTables, 2, {9, -6}); }), "f: kv_lens must be >= 0, got -6 at index 1"
  );
  const NewTokens tokens{.q_lens = kNew};
  EXPECT_EQ(
      message_of([&] { token_rows(read(kTables, 2, kLens), tokens, Ints{0}); }),
      "token_rows: rows must have each of the 10 tokens, got 1"
  );
  EXPECT_EQ(
      message_of([&] { token_rows(read(kTables, 2, kLens), tokens, Ints(10, 10)); }),
      "token_rows: rows must be in [0, 10), got 10 at index 0"
  );
}

TEST(BatchPages, TokensMayShareAPageButNoSlot) {
  const std::string rule =
      "f: block_tables must give each new token a pool row of its own, got row ";
  const auto refuse = [](const Ints& table, const Ints& lens, const Ints& q_lens) {
    return message_of([&] { refuse_shared_slots("f", read(table, 2, lens), {.q_lens = q_lens}); });
  };
  EXPECT_EQ(refuse(kTables, kLens, kNew), "no error");
  EXPECT_EQ(refuse({5, 3, 9, 2, 9, 0}, kLens, kNew), rule + "36 for tokens 3 and 8");
  EXPECT_EQ(refuse({5, 3, 9, 5, 3, 0}, {9, 6}, {1, 0}), "no error");  // cached ones are shared
  EXPECT_EQ(refuse({2, 2}, {2, 4}, {2, 2}), "no error");  // slots 8 and 9, then 10 and 11
}

TEST(BatchPages, CachedTokensOfOneRequestMayBeNewOnesOfAnother) {
  const auto caches = [](const Ints& table, const Ints& lens, const Ints& q_lens) {
    return caches_new_tokens(read(table, 2, lens), {.q_lens = q_lens});
  };
  EXPECT_FALSE(caches(kTables, kLens, kNew));                // 5 is cached up to the first new one
  EXPECT_TRUE(caches({5, 3, 9, 3, 7, 0}, kLens, {4, 2}));    // 3 has cached and new tokens
  EXPECT_FALSE(caches({5, 3, 9, 3, 7, 0}, {9, 1}, {4, 0}));  // of 3 the cached one alone
  EXPECT_TRUE(caches({5, 3, 9, 3, 7, 0}, {9, 2}, {4, 0}));
  EXPECT_TRUE(caches({9, 3, 0, 5, 3, 9}, {6, 9}, {2, 4}));  // the request before, too
  EXPECT_FALSE(caches({5, 3, 9, 5, 7, 0}, kLens, {4, 2}));  // both have 5 as cached
}

TEST(BatchPages, GivenSlotsAreThoseOfThePagesOrNone) {
  const BatchPages pages = read(kTables, 2, kLens);
  const NewTokens tokens{.q_lens = kNew, .padding = 1};
  const Ints own = new_slots(pages, tokens);
  const auto refusal = [&](std::size_t at, int64_t slot) {
    Ints slots = own;
    slots[at] = slot;
    return message_of([&] { check_slots("f", pages, tokens, slots); });
  };
  EXPECT_EQ(
      refusal(1, 13),
      "f: out_cache_loc[1] must be -1 or 14, where the block tables have the token, "
      "got 13"
  );
  EXPECT_EQ(refusal(10, -2), "f: out_cache_loc[10] must be -1 or >= 0, got -2");
  EXPECT_EQ(refusal(10, 13), "no error");
  EXPECT_EQ(
      message_of([&] { check_slots("f", pages, tokens, Ints(3)); }),
      "f: out_cache_loc must have 11 entries, one for each token, got 3"
  );
  std::set<uint64_t> digests{check_slots("f", pages, tokens, own)};
  EXPECT_EQ(*digests.begin(), 0);
  for (std::size_t i = 0; i < own.size(); ++i) {
    Ints slots = own;
    slots[i] = i < 10 ? -1 : 7;
    digests.insert(check_slots("f", pages, tokens, slots));
  }
  EXPECT_EQ(digests.size(), own.size() + 1);
}

TEST(BatchPages, ADigestTellsOrderAndLength) {
  std::set<uint64_t> digests;
  std::vector<int32_t> values(19, 3);
  for (std::size_t i = 0; i < values.size(); ++i) {
    values[i] = 4;
    digests.insert(digest_of(values));
    digests.insert(digest_of(std::span(values).first(i)));
    values[i] = 3;
  }
  EXPECT_EQ(digests.size(), 2 * values.size());
  EXPECT_EQ(digest_of(values), 13320622556311050157U);  // the same on every machine
}

}  // namespace
}  // namespace cpattn
