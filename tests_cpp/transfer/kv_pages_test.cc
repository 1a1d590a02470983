// SPDX-License-Identifier: Apache-2.0
#include "cpattn/transfer/kv_pages.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "cpattn/transfer/kv_pointers.h"
#include "testing.h"

namespace cpattn {
namespace {

using Ints = std::vector<int64_t>;

TEST(GroupRuns, SplitsWhereEitherSideDoes) {
  const Ints src = {2, 3, 7, 8, 9, 12}, dst = {20, 21, 40, 42, 43, 50};
  const std::vector<TransferRun> expected = {{2, 20, 2}, {7, 40, 1}, {8, 42, 2}, {12, 50, 1}};
  EXPECT_EQ(group_runs(src, dst), expected);
}

TEST(GroupRuns, EndsOfInt64) {
  const Ints ends = {INT64_MAX, INT64_MIN, INT64_MIN + 1};
  EXPECT_EQ(group_runs(ends, Ints{0, 1, 2}), (std::vector<TransferRun>{{INT64_MAX, 0, 3}}));
}

TEST(GroupRuns, OneRunOrNone) {
  EXPECT_EQ(group_runs(Ints{5, 6, 7}, Ints{1, 2, 3}), (std::vector<TransferRun>{{5, 1, 3}}));
  EXPECT_TRUE(group_runs(Ints{}, Ints{1}).empty());
  EXPECT_TRUE(group_runs(Ints{1, 2}, Ints{}).empty());
  EXPECT_THROW(group_runs(Ints{1}, Ints{1, 2}), std::invalid_argument);
}

TEST(KvToPageIndices, EveryPageOnce) {
  EXPECT_EQ(kv_to_page_indices(Ints{12, 13, 14, 15, 4, 5}, 4), (std::vector<int32_t>{3, 1}));
  EXPECT_TRUE(kv_to_page_indices(Ints{}, 4).empty());
  EXPECT_EQ(kv_to_page_num(129, 64), 3);
  EXPECT_EQ(kv_to_page_num(INT64_MAX, 2), INT64_MAX / 2 + 1);
}

TEST(MlaKvEntries, TargetsOfEveryGroupThenDrafts) {
  const KVStage last{
      .prefill_start_layer = 2,
      .kv_buf_groups = 2,
      .hidden_kv_layers = 4,
      .draft_kv_layers = 1,
      .is_last_rank = true
  };
  const std::vector<IndexRange> expected = {{2, 4}, {6, 8}, {8, 10}};
  EXPECT_EQ(mla_kv_entries(6, 10, last, false), expected);
  EXPECT_THROW(mla_kv_entries(6, 8, last, false), std::invalid_argument);
}

TEST(KvToPageIndices, SlotsAreNotNegative) {
  const auto message = [](const Ints& slots) {
    return testing::message_of([&] { kv_to_page_indices(slots, 4); });
  };
  EXPECT_EQ(message({0, 1, 2, 3, 8}), "no error");
  constexpr char kRule[] = "kv_to_page_indices: kv_indices must be >= 0, got ";
  EXPECT_EQ(message({-1}), kRule + std::string("-1 at index 0"));
  EXPECT_EQ(message({0, 1, 2, 3, -4}), kRule + std::string("-4 at index 4"));
  EXPECT_EQ(message({0, -1, -1, -1, 8}), "no error") << "one slot of each page is read";
}

TEST(DecodeTargets, SendersOfADecodeRank) {
  for (int64_t prefill : {1, 2, 4, 8}) {
    for (int64_t decode : {1, 2, 4, 8}) {
      for (int64_t rank = 0; rank < 2 * decode; ++rank) {
        for (const bool is_mla : {false, true}) {
          const DecodeTargets targets = decode_targets(rank, prefill, decode, is_mla);
          // Sender s shares the model's heads with a decode rank if their shares of [0, 1) meet.
          int64_t first = prefill, end = 0;
          for (int64_t s = 0; s < prefill; ++s) {
            const int64_t r = rank % decode;
            if (s * decode >= (r + 1) * prefill || r * prefill >= (s + 1) * decode) continue;
            first = std::min(first, s);
            end = s + 1;
          }
          EXPECT_EQ(targets.ranks, (IndexRange{first, end}))
              << prefill << ' ' << decode << ' ' << rank;
          EXPECT_EQ(targets.num_real, is_mla ? 1 : end - first);
          EXPECT_EQ(targets.required_dst_info_num, std::max<int64_t>(1, decode / prefill));
        }
      }
    }
  }
}

TEST(MlaKvEntries, NumbersOfAStageFitIntoInt32) {
  const auto message = [](auto change, bool compat) {
    KVStage stage{.hidden_kv_layers = {}};
    change(stage);
    return testing::message_of([&] { mla_kv_entries(0, 0, stage, compat); });
  };
  static constexpr int64_t kWide = int64_t{INT32_MAX} + 1;
  for (const bool compat : {false, true}) {
    const auto rule = [](const std::string& name) {
      return "get_mla_kv_ptrs_with_pp: " + name + " must fit into int32, got 2147483648";
    };
    EXPECT_EQ(message([](KVStage&) {}, compat), "no error");
    EXPECT_EQ(
        message([](KVStage& stage) { stage.prefill_start_layer = kWide; }, compat),
        rule("prefill_start_layer")
    );
    EXPECT_EQ(
        message([](KVStage& stage) { stage.total_kv_layers = kWide; }, compat),
        rule("total_kv_layers")
    );
    EXPECT_EQ(
        message([](KVStage& stage) { stage.hidden_kv_layers = kWide; }, compat),
        rule("hidden_kv_layers")
    );
    EXPECT_EQ(
        message([](KVStage& stage) { stage.draft_kv_layers = kWide; }, compat),
        rule("draft_kv_layers")
    );
    EXPECT_EQ(
        message([](KVStage& stage) { stage.kv_buf_groups = 0; }, compat),
        "get_mla_kv_ptrs_with_pp: kv_buf_groups must be >= 1, got 0"
    );
    EXPECT_EQ(
        message([](KVStage& stage) { stage.kv_buf_groups = 65537; }, compat),
        "get_mla_kv_ptrs_with_pp: kv_buf_groups must be at most 65536, got 65537"
    );
  }
  EXPECT_EQ(
      message([](KVStage& stage) { stage.total_kv_layers = -1; }, false),
      "get_mla_kv_ptrs_with_pp: the number of layers must be >= 0, got -1"
  );
  EXPECT_EQ(
      message([](KVStage& stage) { stage.prefill_start_layer = -1; }, false),
      "get_mla_kv_ptrs_with_pp: prefill_start_layer must be >= 0, got -1"
  );
}

TEST(MlaKvEntries, EnginesSliceListsAsPythonDoes) {
  const auto entries = [](int64_t first, int64_t num_src) {
    const KVStage stage{.prefill_start_layer = first, .hidden_kv_layers = {}};
    const auto ranges = mla_kv_entries(num_src, 8, stage, true);
    EXPECT_EQ(ranges.size(), 1U) << "of one group without drafts";
    return ranges.at(0);
  };
  EXPECT_EQ(entries(2, 3), (IndexRange{2, 5}));
  EXPECT_EQ(entries(6, 3), (IndexRange{6, 8})) << "[6:9] of eight";
  EXPECT_EQ(entries(9, 3), (IndexRange{8, 8}));
  EXPECT_EQ(entries(-5, 3), (IndexRange{3, 6})) << "[-5:-2] counts from the end";
  EXPECT_EQ(entries(-4, 3), (IndexRange{4, 7})) << "[-4:-1]";
  EXPECT_EQ(entries(-9, 3), (IndexRange{0, 2})) << "[-9:-6]";
  EXPECT_EQ(entries(-2, 3).size(), 0) << "[-2:1]";
}

TEST(MhaKvEntries, RemainderMistakenForDrafts) {
  EXPECT_EQ(mha_kv_entries(14, 30, 0, 15, false).dst_v, (IndexRange{15, 22}));
  EXPECT_EQ(mha_kv_entries(14, 30, 0, 0, true).dst_v, (IndexRange{14, 21}));
}

}  // namespace
}  // namespace cpattn
