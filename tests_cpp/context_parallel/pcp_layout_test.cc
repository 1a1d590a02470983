// SPDX-License-Identifier: Apache-2.0
#include "cpattn/context_parallel/pcp_layout.h"

#include <gtest/gtest.h>

#include <string>

#include "testing.h"

namespace cpattn {
namespace {

using PcpInts = std::vector<int64_t>;
using PcpFlags = std::vector<uint8_t>;

PcpLayout pcp_layout(const PcpInts& extend_lens, const PcpFlags& is_prefill, PcpBatch options) {
  const PcpInts prefix_lens(extend_lens.size(), 16);
  options.extend_lens = extend_lens;
  options.prefix_lens = prefix_lens;
  options.is_prefill = is_prefill;
  return build_pcp_layout(options, "build_pcp_layout");
}

PcpInts requests_of(const PcpLayout& layout, int64_t rank) {
  const auto begin = layout.request.begin();
  return {begin + layout.segment_indptr[rank], begin + layout.segment_indptr[rank + 1]};
}

TEST(PcpLayout, APrefillInChunksOfWhichTheLastIsShort) {
  const PcpLayout layout = pcp_layout({7}, {1}, {.pcp_size = 2});
  EXPECT_EQ(layout.segment_indptr, (PcpInts{0, 2, 4}));
  EXPECT_EQ(layout.batch_start, (PcpInts{0, 6, 2, 4}));
  EXPECT_EQ(layout.batch_stop, (PcpInts{2, 7, 4, 6}));
  EXPECT_EQ(layout.rank_start, (PcpInts{0, 2, 0, 2}));
  EXPECT_EQ(layout.rank_stop, (PcpInts{2, 3, 2, 4}));
  EXPECT_EQ(layout.seq_lens, (PcpInts{18, 23, 20, 22}));
  EXPECT_EQ(hidden_restore_idx(layout), (PcpInts{0, 1, 4, 5, 6, 7, 2}));
  EXPECT_EQ(padded_gather_idx(layout), (PcpInts{0, 1, 6, 0, 2, 3, 4, 5}));
  EXPECT_EQ(gathered_kv_write_mask(layout), (PcpFlags{1, 1, 1, 0, 1, 1, 1, 1}));
}

TEST(PcpLayout, ChunksBehindTheEndAreLeftOut) {
  const PcpLayout layout =
      pcp_layout({9}, {1}, {.pcp_size = 4});  // 2, 2, 2, 2, 1 and three of none
  EXPECT_EQ(layout.segment_indptr, (PcpInts{0, 1, 2, 3, 5}));
  EXPECT_EQ(layout.batch_stop, (PcpInts{2, 4, 6, 8, 9}));
  EXPECT_EQ(layout.padded_num_tokens, 3);
}

TEST(PcpLayout, DecodesGoToRanksInTurn) {
  const PcpLayout layout =
      pcp_layout({1, 1, 1}, {0, 0, 0}, {.pcp_size = 2, .padded_num_tokens = 4});
  EXPECT_EQ(requests_of(layout, 0), (PcpInts{0, 2}));
  EXPECT_EQ(requests_of(layout, 1), (PcpInts{1}));
  EXPECT_EQ(hidden_restore_idx(layout), (PcpInts{0, 4, 1}));
  EXPECT_EQ(padded_gather_idx(layout), (PcpInts{0, 2, 0, 0, 1, 0, 0, 0}));
  EXPECT_EQ(gathered_kv_write_mask(layout), (PcpFlags{1, 1, 0, 0, 1, 0, 0, 0}));
  EXPECT_EQ(layout.replicated, (PcpFlags{0, 0, 0}));

  const PcpLayout among = pcp_layout({8, 1, 0, 1}, {1, 0, 0, 0}, {.pcp_size = 2});
  EXPECT_EQ(requests_of(among, 0), (PcpInts{1, 0, 0}));
  EXPECT_EQ(requests_of(among, 1), (PcpInts{3, 0, 0}));
  EXPECT_EQ(requests_of(pcp_layout({1}, {0}, {.pcp_size = 3}), 2), PcpInts{});
}

TEST(PcpLayout, DecodesOnAllRanksHaveOneWriter) {
  const PcpLayout layout =
      pcp_layout({1, 2}, {0, 0}, {.pcp_size = 2, .shard_decode = false, .padded_num_tokens = 4});
  EXPECT_EQ(requests_of(layout, 1), (PcpInts{0, 1}));
  EXPECT_EQ(hidden_restore_idx(layout), (PcpInts{0, 1, 2}));
  EXPECT_EQ(padded_gather_idx(layout), (PcpInts{0, 1, 2, 0, 0, 1, 2, 0}));
  EXPECT_EQ(gathered_kv_write_mask(layout), (PcpFlags{1, 1, 1, 0, 0, 0, 0, 0}));
  EXPECT_EQ(layout.replicated, (PcpFlags{1, 1}));
  EXPECT_EQ(
      pcp_layout({1, 2}, {0, 0}, {.pcp_size = 2, .dcp_size = 2}).replicated, (PcpFlags{1, 1})
  );
}

TEST(PcpLayout, UnderDcpPrefillsThatDoNotFillAllChunksAreOnAllRanks) {
  for (const int64_t len : {1, 2, 3, 5, 6, 9}) {
    const PcpLayout layout = pcp_layout({len}, {1}, {.pcp_size = 2, .dcp_size = 2});
    EXPECT_EQ(layout.replicated[0], 1) << len;
    EXPECT_EQ(layout.batch_stop, (PcpInts{len, len}));
    EXPECT_EQ(pcp_layout({len}, {1}, {.pcp_size = 2}).replicated[0], 0);
  }
  EXPECT_EQ(pcp_layout({4}, {1}, {.pcp_size = 2, .dcp_size = 2}).replicated[0], 0);
  const PcpLayout layout = pcp_layout({64, 3, 64, 1}, {1, 1, 1, 0}, {.pcp_size = 4, .dcp_size = 2});
  for (int64_t rank = 0; rank < 4; ++rank) {
    EXPECT_EQ(requests_of(layout, rank), (PcpInts{3, 0, 0, 1, 2, 2})) << rank;
  }
}

TEST(PcpLayout, OneNewTokenBehindCachedOnesIsADecode) {
  const PcpInts extend = {1, 1, 2, 0}, prefix = {4, 0, 4, 4};
  const PcpBatch batch = {.extend_lens = extend, .prefix_lens = prefix, .pcp_size = 2};
  EXPECT_EQ(build_pcp_layout(batch, "f").is_prefill, (PcpFlags{0, 1, 1, 1}));
}

TEST(PcpLayout, AnEmptyBatch) {
  const PcpLayout layout = pcp_layout({}, {}, {.pcp_size = 3});
  EXPECT_EQ(layout.segment_indptr, (PcpInts{0, 0, 0, 0}));
  EXPECT_EQ(padded_gather_idx(layout), PcpInts{});
}

TEST(PcpLayout, Refusals) {
  const PcpInts two = {1, 2}, below = {1, -1}, most = {INT32_MAX, 1}, one = {5};
  const PcpFlags flag = {1};
  const auto refused = [](const PcpBatch& batch) {
    return testing::message_of([&] { build_pcp_layout(batch, "f"); });
  };
  EXPECT_EQ(
      refused({.extend_lens = two, .prefix_lens = one}),
      "f: prefix_lens must have 2 values, as extend_lens, got 1"
  );
  EXPECT_EQ(
      refused({.extend_lens = two, .prefix_lens = two, .is_prefill = flag}),
      "f: is_prefill must have 2 values, as extend_lens, got 1"
  );
  EXPECT_EQ(
      refused({.extend_lens = below, .prefix_lens = two}),
      "f: extend_lens must be >= 0 and fit into int32, got -1 at index 1"
  );
  EXPECT_EQ(
      refused({.extend_lens = two, .prefix_lens = most}),
      "f: extend_lens + prefix_lens must fit into int32, got 2147483648 at index 0"
  );
  EXPECT_EQ(
      refused({.extend_lens = most, .prefix_lens = PcpInts{0, 0}}),
      "f: the sum of extend_lens must fit into int32, got 2147483648"
  );
  EXPECT_EQ(
      refused({.extend_lens = two, .prefix_lens = two, .pcp_size = 0}),
      "f: pcp_size must be in [1, 32768], got 0"
  );
  EXPECT_EQ(
      refused({.extend_lens = two, .prefix_lens = two, .dcp_size = 32769}),
      "f: dcp_size must be in [1, 32768], got 32769"
  );
  EXPECT_EQ(
      refused({.extend_lens = two, .prefix_lens = two, .padded_num_tokens = 2}),
      "f: padded_num_tokens must be at least the 3 rows of a rank, and fit into int32, got 2"
  );
}

}  // namespace
}  // namespace cpattn
