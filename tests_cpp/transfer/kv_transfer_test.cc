// SPDX-License-Identifier: Apache-2.0
#include "cpattn/transfer/kv_transfer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <stdexcept>
#include <utility>
#include <vector>

#include "meta/transfer/kv_runs.h"
#include "testing.h"

namespace cpattn {
namespace {

using Ints = std::vector<int64_t>;

KVEntry buffer(int64_t num_pages) {
  return {.num_bytes = static_cast<uint64_t>(num_pages), .item_len = 1};
}

TEST(TokenRuns, JoinAcrossTheOrderOfTheSequence) {
  const KVEntry entry = buffer(100);
  const Ints src = {7, 2, 3, 8}, dst = {41, 20, 21, 42};
  const std::vector<TransferRun> runs =
      token_runs({.pages = src, .smallest = &entry}, {.pages = dst, .smallest = &entry}, {0, 4});
  EXPECT_EQ(runs, (std::vector<TransferRun>{{2, 20, 2}, {7, 41, 2}}));
}

TEST(TokenRuns, PagesOfBothSidesCutTokens) {
  const KVEntry entry = buffer(100);
  const Ints src = {5}, dst = {9, 3};
  const KVPageList from = {.pages = src, .page_size = 8, .smallest = &entry};
  const KVPageList to = {.pages = dst, .page_size = 4, .smallest = &entry};
  EXPECT_EQ(token_runs(from, to, {1, 7}), (std::vector<TransferRun>{{44, 12, 3}, {41, 37, 3}}));
}

TEST(TokenRuns, InterleavedTokensGoToTheirRankAndNoOther) {
  const KVEntry entry = buffer(100);
  const Ints src = {0, 1, 2}, dst = {6, 7};
  const KVPageList from = {.pages = src, .page_size = 4, .smallest = &entry};
  for (int64_t interleave : {1, 2, 3, 4, 5}) {
    std::vector<int> received(12, 0);
    for (int64_t rank = 0; rank < 2; ++rank) {
      const KVPageList to = {
          .pages = dst,
          .page_size = 4,
          .smallest = &entry,
          .dcp_rank = rank,
          .dcp_size = 2,
          .dcp_interleave = interleave
      };
      for (const TransferRun& run : token_runs(from, to, {0, 12})) {
        for (int64_t i = 0; i < run.count; ++i) {
          const int64_t token = run.src + i;
          ++received[token];
          EXPECT_EQ(token / interleave % 2, rank);
          const int64_t local = token / interleave / 2 * interleave + token % interleave;
          EXPECT_EQ(run.dst + i, 6 * 4 + local);
        }
      }
    }
    EXPECT_EQ(received, std::vector<int>(12, 1)) << "interleave " << interleave;
  }
}

TEST(TokenRuns, RanksThatStripePagesHaveTheirsAlone) {
  const KVEntry entry = buffer(100);
  const Ints src = {3, 8, 4, 7}, dst = {6, 5, 9, 2};  // of groups of three and two
  const auto runs = [&](int64_t rank, int64_t to_rank) {
    const KVPageList from = {
        .pages = src, .page_size = 4, .smallest = &entry, .shard_rank = rank, .shard_size = 3
    };
    const KVPageList to = {
        .pages = dst, .page_size = 4, .smallest = &entry, .shard_rank = to_rank, .shard_size = 2
    };
    return token_runs(from, to, {1, 15});
  };
  using Runs = std::vector<TransferRun>;
  EXPECT_EQ(runs(0, 0), (Runs{{1 * 4 + 1, 3 * 4 + 1, 3}})) << "page 3 to page 6, without token 0";
  EXPECT_EQ(runs(0, 1), Runs{});
  EXPECT_EQ(runs(1, 0), (Runs{{2 * 4, 1 * 4, 3}})) << "page 7 to page 2, up to token 14";
  EXPECT_EQ(runs(1, 1), (Runs{{1 * 4, 4 * 4, 4}})) << "page 4 to page 9";
  EXPECT_EQ(runs(2, 1), (Runs{{2 * 4, 2 * 4, 4}})) << "page 8 to page 5";
}

TEST(TokenRuns, NamesPagesOfAGroupThatAreOutOfItsBuffers) {
  const KVEntry entry = buffer(3);
  const auto message = [&](const Ints& pages) {
    const KVPageList list = {
        .side = "source", .pages = pages, .smallest = &entry, .shard_rank = 1, .shard_size = 2
    };
    const Ints to = {0, 1};
    return testing::message_of([&] {
      token_runs(list, {.pages = to, .smallest = &entry}, {0, std::ssize(pages)});
    });
  };
  EXPECT_EQ(message({5, 1}), "no error");
  EXPECT_EQ(message({6, 1}), "no error") << "of another rank, whose buffers may be longer";
  EXPECT_EQ(
      message({1, 7}),
      "plan_kv_transfer: source pages must be in [0, 2 * 3) for k of layer 0, got 7 at index 1"
  );
  EXPECT_NE(message({-1, 1}), "no error");
}

TEST(TokensOfShard, AreThoseOfItsPages) {
  const Ints pages = {4, 1, 3, 6, 5};
  const KVPageList list = {
      .pages = pages, .page_size = 4, .start = 8, .shard_rank = 1, .shard_size = 2
  };
  using Ranges = std::vector<IndexRange>;
  EXPECT_EQ(tokens_of_shard(list, {8, 28}), (Ranges{{12, 20}, {24, 28}}));
  EXPECT_EQ(tokens_of_shard(list, {13, 25}), (Ranges{{13, 20}, {24, 25}}));
  EXPECT_EQ(tokens_of_shard(list, {8, 12}), Ranges{});
  EXPECT_EQ(tokens_of_shard({.pages = pages}, {2, 5}), (Ranges{{2, 5}})) << "no group";
  const Ints negative = {-1};
  const KVPageList wrong = {.side = "source", .pages = negative, .shard_size = 2};
  EXPECT_EQ(
      testing::message_of([&] { tokens_of_shard(wrong, {0, 1}); }),
      "plan_kv_transfer: source pages must be >= 0, got -1 at index 0"
  );
}

TEST(TokenRuns, SortsPagesOfAnyDistance) {
  constexpr int64_t kCount = 3000;
  std::mt19937_64 generator(1);
  for (const int64_t spread : {int64_t{1}, int64_t{1000}, int64_t{1} << 40}) {
    Ints src(kCount), dst(kCount);
    for (int64_t i = 0; i < kCount; ++i) {
      src[i] = 2 * i;  // no neighbours
      dst[i] = i * spread;
    }
    std::shuffle(dst.begin(), dst.end(), generator);
    const KVEntry entry = buffer(kCount << 40);
    const std::vector<TransferRun> runs = token_runs(
        {.pages = src, .smallest = &entry}, {.pages = dst, .smallest = &entry}, {0, kCount}
    );
    ASSERT_EQ(runs.size(), static_cast<std::size_t>(kCount));
    for (int64_t i = 0; i < kCount; ++i) {
      EXPECT_EQ(runs[i].dst, i * spread);
      EXPECT_EQ(dst[runs[i].src / 2], runs[i].dst);
    }
  }
}

TEST(TokenRuns, RefusesAPageTwice) {
  const KVEntry entry = buffer(100);
  const Ints src = {1, 2, 3}, dst = {4, 9, 4};
  const KVPageList from = {.pages = src, .smallest = &entry};
  const KVPageList to = {.pages = dst, .smallest = &entry};
  EXPECT_THROW(token_runs(from, to, {0, 3}), std::invalid_argument);
  EXPECT_EQ(token_runs(from, to, {0, 2}).size(), 2u);
}

TEST(TokenRuns, RefusesMoreStepsThanASequenceNeeds) {
  constexpr int64_t kTokens = INT32_MAX;  // in one page, of which each second goes to a rank
  const KVEntry entry = buffer(kTokens);
  const Ints page = {0};
  const KVPageList from = {.pages = page, .page_size = kTokens, .smallest = &entry};
  KVPageList to = from;
  to.dcp_size = 2;
  EXPECT_EQ(
      testing::message_of([&] { token_runs(from, to, {0, kTokens}); }),
      "plan_kv_transfer: pages and dcp_interleave must cut a sequence into at most 16777216 "
      "pieces, "
      "got more of tokens [0, 2147483647)"
  );
  to.dcp_interleave = 1 << 20;
  EXPECT_EQ(token_runs(from, to, {0, kTokens}).size(), std::size_t{1} << 10);
}

TEST(CheckPagesDistinct, LooksAtPagesThatAreWrittenAndAtThoseBefore) {
  const auto message = [](const Ints& pages, IndexRange tokens) {
    return testing::message_of([&] {
      check_pages_distinct({.pages = pages, .page_size = 4}, tokens);
    });
  };
  EXPECT_EQ(message({5, 6, 7}, {0, 12}), "no error");
  EXPECT_NE(message({5, 6, 5}, {0, 12}), "no error");
  EXPECT_NE(message({5, 6, 5}, {0, 9}), "no error") << "one token of the last page";
  EXPECT_EQ(message({5, 6, 5}, {0, 8}), "no error") << "the last page is not written";
  EXPECT_NE(message({5, 6, 5}, {8, 9}), "no error") << "one token that another page has";
  EXPECT_EQ(message({5, 5, 6}, {8, 12}), "no error") << "twice, but not written";
  EXPECT_EQ(message({5, 5}, {4, 4}), "no error") << "nothing is written";
  EXPECT_EQ(message({5, 5}, {5, 5}), "no error");
}

TEST(CheckHolds, RoomOfInterleavedPagesEndsWhereTheNextTokenWouldNotFit) {
  const Ints pages = {0, 1};
  for (int64_t rank = 0; rank < 3; ++rank) {
    const KVPageList list = {
        .pages = pages, .page_size = 4, .dcp_rank = rank, .dcp_size = 3, .dcp_interleave = 5
    };
    const int64_t ninth = 15 + rank * 5 + 3;  // token of row 8: five rows of a cycle, then three
    EXPECT_NO_THROW(check_holds(list, {0, ninth}));
    EXPECT_THROW(check_holds(list, {0, ninth + 1}), std::invalid_argument);
  }
}

TEST(CheckHolds, LargestSizesStayInInt64) {
  const Ints pages(8);
  const KVPageList list = {
      .pages = pages, .page_size = INT32_MAX, .dcp_size = INT32_MAX, .dcp_interleave = INT32_MAX
  };
  EXPECT_NO_THROW(check_holds(list, {0, int64_t{1} << 48}));
}

TEST(KVLayout, HeadsOfRanks) {
  const auto heads = [](int64_t rank, int64_t size, int64_t total) {
    return KVLayout({}, {.page_size = 1, .tp_rank = rank, .tp_size = size, .total_kv_heads = total})
        .heads(KVKind::k);
  };
  EXPECT_EQ(heads(1, 2, 8), (IndexRange{4, 8}));
  EXPECT_EQ(heads(5, 8, 4), (IndexRange{2, 3}));
  EXPECT_EQ(heads(3, 4, 1), (IndexRange{0, 1}));
}

TEST(MakeTransferPlan, ShiftedEntriesAreThoseMadeAlone) {
  const std::vector<TransferRun> runs = {{2, 7, 3}, {9, 1, 1}};
  const std::vector<TransferEntry> entries = {
      {100, 1000, 4, 4, 4, "k"},
      {50, 3000, 4, 4, 4, "k"},
      {50, 3000, 8, 4, 4, "v"},
      {UINT64_MAX - 8, 5000, 8, 4, 4, "v"},
      {0, 0, 8, 8, 8, "k"}
  };
  const TransferPlan plan = make_transfer_plan(entries, runs);
  std::size_t block = 0;
  for (const TransferEntry& entry : entries) {
    const TransferPlan alone = make_transfer_plan({&entry, 1}, runs);
    for (std::size_t i = 0; i < alone.num_blocks(); ++i, ++block) {
      EXPECT_EQ(plan.src_addrs()[block], alone.src_addrs()[i]);
      EXPECT_EQ(plan.dst_addrs()[block], alone.dst_addrs()[i]);
      EXPECT_EQ(plan.lengths()[block], alone.lengths()[i]);
    }
  }
  EXPECT_EQ(block, plan.num_blocks());
  ASSERT_EQ(plan.parts().size(), 3u);
  EXPECT_EQ(plan.parts()[1].num_entries, 2u);
  EXPECT_EQ(plan.parts()[1].num_blocks, 8u);
}

/// Where every byte goes, in order.
using Copies = std::vector<std::pair<uint64_t, uint64_t>>;

TEST(MakeTransferPlan, CopiesEveryByteOfEveryUnit) {
  std::mt19937_64 random(13);
  for (int round = 0; round < 300; ++round) {
    std::vector<TransferRun> runs(random() % 4);
    const auto below = [&](int64_t n) { return static_cast<int64_t>(random() % n); };
    for (TransferRun& run : runs) run = {below(9), below(9), 1 + below(3)};
    std::vector<TransferEntry> entries(random() % 5);
    for (TransferEntry& entry : entries) {  // neighbours often differ in one thing alone
      entry = {random() % 100, random() % 100, 2 + random() % 2, 2 + random() % 2, 0, "k"};
      entry.bytes = std::min({entry.src_stride, entry.dst_stride, 2 + random() % 2});
    }
    Copies wanted, copies;
    std::size_t num_blocks = 0;
    for (const TransferEntry& entry : entries) {
      for (const TransferRun& run : runs) {
        const bool joined = entry.src_stride == entry.bytes && entry.dst_stride == entry.bytes;
        num_blocks += joined ? 1 : run.count;
        for (int64_t unit = 0; unit < run.count; ++unit) {
          for (uint64_t byte = 0; byte < entry.bytes; ++byte) {
            wanted.emplace_back(
                entry.src_addr + (run.src + unit) * entry.src_stride + byte,
                entry.dst_addr + (run.dst + unit) * entry.dst_stride + byte
            );
          }
        }
      }
    }
    const TransferPlan plan = make_transfer_plan(entries, runs);
    EXPECT_EQ(plan.num_blocks(), num_blocks);
    for (std::size_t i = 0; i < plan.num_blocks(); ++i) {
      for (uint64_t byte = 0; byte < plan.lengths()[i]; ++byte) {
        copies.emplace_back(plan.src_addrs()[i] + byte, plan.dst_addrs()[i] + byte);
      }
    }
    EXPECT_EQ(copies, wanted);
    EXPECT_EQ(plan.total_bytes(), wanted.size());
  }
}

TEST(MakeTransferPlan, RefusesBlocksWhoseNumberWouldWrap) {
  constexpr int64_t kMost = int64_t{1} << 28;
  const auto make = [](std::size_t num_entries, int64_t count, std::size_t num_runs, bool rows) {
    const TransferEntry entry = {0, 0, 8, 8, rows ? 4u : 8u, "k"};
    const std::vector<TransferEntry> entries(num_entries, entry);
    const std::vector<TransferRun> runs(num_runs, {0, 0, count});
    return make_transfer_plan(entries, runs).num_blocks();
  };
  EXPECT_EQ(make(2, INT64_MAX, 3, false), 6u);  // whole runs are a block each
  EXPECT_EQ(make(4, 1000, 2, true), 8000u);
  EXPECT_THROW(make(1, kMost + 1, 1, true), std::invalid_argument);
  EXPECT_THROW(make(2, kMost / 2 + 1, 1, true), std::invalid_argument);
  EXPECT_THROW(make(1 << 12, int64_t{1} << 49, 1 << 3, true), std::invalid_argument);  // 2^64
  EXPECT_THROW(make(1, INT64_MAX, 3, true), std::invalid_argument);
}

}  // namespace
}  // namespace cpattn
