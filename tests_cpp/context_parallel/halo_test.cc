// SPDX-License-Identifier: Apache-2.0
#include "cpattn/context_parallel/halo.h"

#include <gtest/gtest.h>

#include "testing.h"

namespace cpattn {
namespace {

using HaloLens = std::vector<int64_t>;

RankRows rows_of(const HaloLens& extend, const HaloLens& seq) {
  return rank_rows(build_cp_metadata(
      {.extend_lens = extend, .seq_lens = seq, .cp_size = 2, .strategy = CpStrategy::contiguous}, 0
  ));
}

TEST(Halo, RowsOfTheOtherRankAndOfACache) {
  const RankRows rows = rows_of({8}, {11});  // tokens 3..6 and 7..10
  const HaloPlan first = plan_halo(rows, 0, 4, 2, "halo"),
                 second = plan_halo(rows, 1, 4, 2, "halo");
  EXPECT_EQ(first.cached_position, (HaloLens{0, 1, 2}));
  EXPECT_EQ(first.unit_ids, (HaloLens{1, 2}));
  EXPECT_EQ(first.send_indices, (HaloLens{1, 2, 3}));
  EXPECT_EQ(first.send_counts, (HaloLens{0, 3}));
  EXPECT_EQ(second.recv_counts, (HaloLens{3, 0}));
  EXPECT_EQ(second.extended_indices, (HaloLens{4, 5, 6, 0, 1, 2, 3}));
  EXPECT_EQ(second.unit_ids, (HaloLens{3, 4}));
  EXPECT_EQ(second.unit_starts, (HaloLens{0, 2}));
  EXPECT_EQ(second.unit_lens, (HaloLens{4, 4}));
  EXPECT_EQ(
      testing::message_of([&] { plan_halo(rows, 0, 3, 4, "halo"); }),
      "halo: window must be >= ratio = 4 and fit into int32, got 3"
  );
}

TEST(Pending, RowsOfTheNextUnitGoToTheirKeepers) {
  // Tokens 0..4 and 5..9; the next unit begins with token 4.
  const RankRows rows = rows_of({10}, {10});
  const RelayoutPlan all = plan_pending(rows, 0, 8, 4, std::nullopt, "pending");
  EXPECT_EQ(all.send_counts, (HaloLens{1, 1}));
  EXPECT_EQ(all.send_indices, (HaloLens{4, 4}));
  EXPECT_EQ(all.recv_counts, (HaloLens{1, 5}));
  EXPECT_EQ(all.recv_indices, (HaloLens{4, 5, 6, 7, 0, 1}));
  const HaloLens keepers = {1}, wrong = {2}, many = {0, 0};
  const RelayoutPlan one = plan_pending(rows, 0, 8, 4, keepers, "pending");
  EXPECT_EQ(one.send_counts, (HaloLens{0, 1}));
  EXPECT_EQ(one.recv_indices, HaloLens{});
  EXPECT_EQ(
      testing::message_of([&] { plan_pending(rows, 0, 8, 4, wrong, "pending"); }),
      "pending: keepers must be in [-1, 2), got 2 at index 0"
  );
  EXPECT_EQ(
      testing::message_of([&] { plan_pending(rows, 0, 8, 4, many, "pending"); }),
      "pending: keepers must have one rank per sequence (1), got 2"
  );
  const RankRows two = rows_of({4, 6}, {4, 6});
  EXPECT_EQ(
      testing::message_of([&] { plan_pending(two, 0, 8, 4, HaloLens{0, 2}, "pending"); }),
      "pending: keepers must be in [-1, 2), got 2 at index 1"
  );
}

}  // namespace
}  // namespace cpattn
