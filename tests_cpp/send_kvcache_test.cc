// SPDX-License-Identifier: Apache-2.0
#include "cpattn/send_kvcache.h"

#include <gtest/gtest.h>

#include <vector>

namespace cpattn {
namespace {

using Ints = std::vector<int64_t>;
using Words = std::vector<uint64_t>;

Words words(std::span<const uint64_t> values) { return {values.begin(), values.end()}; }

TEST(PlanSendKvcache, SecondOfTwoStages) {
  const Words src = {1000, 2000, 3000, 4000}, item_lens = {64, 128, 256, 512};
  const Words dst = {10'000, 20'000, 30'000, 40'000, 50'000, 60'000, 70'000, 80'000};
  const SendBuffers buffers{
      .src_addrs = src,
      .src_data_lens = {},
      .src_item_lens = item_lens,
      .dst_addrs = dst,
      .dst_item_lens = {}
  };
  const Ints src_pages = {1, 2}, dst_pages = {3, 4};
  const SendStage stage{
      .kv = {.prefill_start_layer = 2, .total_kv_layers = 4, .hidden_kv_layers = {}}, .pp_size = 2
  };
  for (const bool compat : {false, true}) {
    const TransferPlan plan = plan_send_kvcache(buffers, {src_pages, dst_pages}, stage, compat);
    EXPECT_EQ(words(plan.src_addrs()), (Words{1064, 2128, 3256, 4512}));
    EXPECT_EQ(words(plan.dst_addrs()), (Words{30'192, 40'384, 70'768, 81'536}));
    EXPECT_EQ(words(plan.lengths()), (Words{128, 256, 512, 1024}));
  }
}

TEST(PlanSendKvcacheSlice, NeedsAnItemLengthOfTheDestination) {
  const Words src = {0, 0}, item_lens = {8, 8}, dst = {0, 0};
  const SendBuffers buffers{
      .src_addrs = src,
      .src_data_lens = {},
      .src_item_lens = item_lens,
      .dst_addrs = dst,
      .dst_item_lens = {}
  };
  const Ints page = {0};
  const HeadSlice heads{.num_heads = 1, .src_heads = 1, .dst_heads = 1};
  const auto plan = [&](bool compat) {
    plan_send_kvcache_slice(buffers, {page, page}, 1, heads, {.kv = {}}, compat);
  };
  EXPECT_THROW(plan(/*compat=*/false), std::invalid_argument);
  EXPECT_THROW(plan(/*compat=*/true), std::out_of_range);
}

TEST(PlanSendItems, StopsAtTheShorterListOnlyAsEnginesDo) {
  const Words src = {0}, item_lens = {8}, dst = {0, 0};
  const SendBuffers buffers{
      .src_addrs = src,
      .src_data_lens = {},
      .src_item_lens = item_lens,
      .dst_addrs = dst,
      .dst_item_lens = {}
  };
  const Ints slot = {0};
  EXPECT_THROW(plan_send_items("f", "aux", buffers, {slot, slot}, false), std::invalid_argument);
  EXPECT_EQ(plan_send_items("f", "aux", buffers, {slot, slot}, true).num_blocks(), 1);
}

TEST(SliceHeads, ReplicasShareAHead) {
  EXPECT_EQ(slice_heads(4, 8, 3, 2, 0, false).dst_start, 1);
  EXPECT_EQ(slice_heads(2, 1, 0, 4, 3, false).src_start, 1);
  EXPECT_THROW(slice_heads(8, 4, 0, 2, 1, false), std::invalid_argument);
  EXPECT_EQ(slice_heads(8, 4, 0, 2, 1, true).num_heads, 2);
}

TEST(Concatenate, OnePlanAfterTheOther) {
  const std::vector<TransferRun> runs = {{0, 0, 1}};
  std::vector<TransferPlan> plans;
  for (const uint64_t addr : {8, 16}) {
    const TransferEntry entry{.src_addr = addr, .src_stride = 4, .dst_stride = 4, .bytes = 4};
    plans.push_back(make_transfer_plan({&entry, 1}, runs));
  }
  EXPECT_EQ(words(concatenate(plans).src_addrs()), (Words{8, 16}));
  EXPECT_EQ(concatenate({}).num_blocks(), 0u);
}

}  // namespace
}  // namespace cpattn
