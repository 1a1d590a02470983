// SPDX-License-Identifier: Apache-2.0
#include "cpattn/kv/units.h"

#include <gtest/gtest.h>

#include "testing.h"

namespace cpattn {
namespace {

using UnitInts = std::vector<int64_t>;
using Sharing = UnitPools::Sharing;

/// Tokens 2..9 and 10..17 of a request, which complete units 0..1 and 2..3 of four tokens.
RankRows rows_of_units() {
  const UnitInts extend = {16}, seq = {18};
  return rank_rows(build_cp_metadata(
      {.extend_lens = extend, .seq_lens = seq, .cp_size = 2, .strategy = CpStrategy::contiguous}, 0
  ));
}

UnitPools pools_of(const UnitInts& pages, Sharing sharing, Interleave placement) {
  return {
      .block_tables =
          {.data = pages.data(),
           .is_int64 = true,
           .rows = 1,
           .columns = static_cast<int64_t>(pages.size()),
           .row_stride = static_cast<int64_t>(pages.size())},
      .page_size = 2,
      .sharing = sharing,
      .placement = placement,
  };
}

TEST(Units, Refusals) {
  const UnitInts pages = {7}, negative = {7, -1};
  const Interleave three{.shard_size = 3, .run_len = 2}, four{.shard_size = 2, .run_len = 4};
  const auto refusal = [](const UnitPools& pools, int64_t ratio = 4) {
    return testing::message_of([&] { plan_units(rows_of_units(), 0, ratio, pools, "units"); });
  };
  const UnitPools all = pools_of(pages, Sharing::nothing, {});
  EXPECT_EQ(refusal(all, 0), "units: ratio must be >= 1 and fit into int32, got 0");
  EXPECT_EQ(refusal(all), "units: block_tables must have at least 2 columns for sequence 0, got 1");
  EXPECT_EQ(
      refusal(pools_of(negative, Sharing::nothing, {})),
      "units: page ids must be in [0, 2^31), got -1 at position 1 of sequence 0"
  );
  EXPECT_EQ(
      refusal(pools_of(pages, Sharing::units, three)),
      "units: shard_size of placement must be the number of ranks, 2, got 3"
  );
  EXPECT_EQ(
      refusal(pools_of(pages, Sharing::slots, four)),
      "units: page_size of placement must be page_size, 2, got 4"
  );
  UnitPools wrong = all;
  wrong.page_size = 0;
  EXPECT_EQ(refusal(wrong), "units: page_size must be in [1, 2147483647], got 0");
  wrong = all;
  wrong.block_tables.rows = 2;
  EXPECT_EQ(refusal(wrong), "units: block_tables must have one row per sequence (1), got 2");
}

}  // namespace
}  // namespace cpattn
