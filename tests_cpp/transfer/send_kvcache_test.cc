// SPDX-License-Identifier: Apache-2.0
#include "cpattn/transfer/send_kvcache.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include "testing.h"

namespace cpattn {
namespace {

using testing::message_of;
using Ints = std::vector<int64_t>;
using Words = std::vector<uint64_t>;

using Span = std::span<const uint64_t>;

Words words(Span values) { return {values.begin(), values.end()}; }

/// What a sender and its receiver know of their buffers: views of these lists.
SendBuffers buffers_of(
    Span src, Span src_item_lens, Span dst, Span dst_item_lens = {}, Span src_data_lens = {}
) {
  return {
      .src_addrs = src,
      .src_data_lens = src_data_lens,
      .src_item_lens = src_item_lens,
      .dst_addrs = dst,
      .dst_item_lens = dst_item_lens
  };
}

TEST(PlanSendKvcache, SecondOfTwoStages) {
  const Words src = {1000, 2000, 3000, 4000}, item_lens = {64, 128, 256, 512};
  const Words dst = {10'000, 20'000, 30'000, 40'000, 50'000, 60'000, 70'000, 80'000};
  const SendBuffers buffers = buffers_of(src, item_lens, dst);
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

/// The parts of a plan of one page, as "name x entries".
std::vector<std::string> parts_of(std::size_t num_src, const SendStage& stage) {
  const Words src(num_src, 0), item_lens(num_src, 8), dst(num_src, 0);
  const SendBuffers buffers = buffers_of(src, item_lens, dst);
  const Ints page = {0};
  const TransferPlan plan = plan_send_kvcache(buffers, {page, page}, stage, true);
  std::vector<std::string> names;
  for (const TransferPart& part : plan.parts()) {
    names.push_back(part.name + " x " + std::to_string(part.num_entries));
  }
  return names;
}

TEST(PlanSendKvcache, NamesDraftsOfTheLastStageAlone) {
  using Names = std::vector<std::string>;
  const auto stage = [](bool is_last, int64_t pp_size, int64_t drafts, int64_t groups) {
    return SendStage{
        .kv =
            {.kv_buf_groups = groups,
             .hidden_kv_layers = {},
             .draft_kv_layers = drafts,
             .is_last_rank = is_last},
        .pp_size = pp_size,
        .is_mla = groups != 2
    };
  };
  const Names whole = {"k x 3", "v x 3"};
  const Names with_draft = {"k x 2", "v x 2", "draft k x 1", "draft v x 1"};
  EXPECT_EQ(parts_of(6, stage(false, 1, 0, 2)), whole);
  EXPECT_EQ(parts_of(6, stage(false, 2, 1, 2)), whole) << "the last stage has the drafts";
  EXPECT_EQ(parts_of(6, stage(true, 2, 1, 2)), with_draft);
  EXPECT_EQ(parts_of(6, stage(false, 1, 1, 2)), with_draft) << "the only stage is the last one";
  EXPECT_EQ(parts_of(6, stage(true, 1, 3, 2)), whole) << "more drafts than layers are none";
  EXPECT_EQ(parts_of(3, stage(true, 1, 2, 1)), (Names{"k x 1", "draft k x 2"}));
  EXPECT_EQ(parts_of(6, stage(true, 1, 0, 3)), (Names{"k x 2", "v x 2", "index_k x 2"}));
  EXPECT_EQ(parts_of(8, stage(true, 1, 0, 4)), (Names{"kv x 8"})) << "groups without names";
  EXPECT_EQ(parts_of(7, stage(true, 1, 0, 3)), (Names{"kv x 7"}));
}

/// A sender with `num_src` entries of eight bytes, to `num_dst`: the bytes sent, or the error.
std::string sent(std::size_t num_src, std::size_t num_dst, const SendStage& stage, bool compat) {
  const Words src(num_src, 0), item_lens(num_src, 8), dst(num_dst, 0);
  const SendBuffers buffers = buffers_of(src, item_lens, dst);
  const Ints page = {0};
  uint64_t bytes = 0;
  const std::string message = message_of([&] {
    bytes = plan_send_kvcache(buffers, {page, page}, stage, compat).total_bytes();
  });
  return message == "no error" ? std::to_string(bytes) : message;
}

TEST(PlanSendKvcache, AWholeModelOfUnknownLengthHasNoDrafts) {
  const SendStage unknown{.kv = {.hidden_kv_layers = {}}, .is_mla = true};
  EXPECT_EQ(sent(2, 3, unknown, false), "16");
  SendStage known = unknown;
  known.kv.total_kv_layers = 1;
  EXPECT_NE(sent(2, 3, known, false).find("must have the 1 drafts"), std::string::npos);
  EXPECT_EQ(sent(2, 2, known, false), "16");
}

TEST(PlanSendKvcache, ADraftTailOfTheDestinationIsLeftAlone) {
  const SendStage stage{
      .kv = {.total_kv_layers = 2, .hidden_kv_layers = {}}, .pp_size = 2, .is_mla = true
  };
  EXPECT_EQ(sent(2, 3, stage, true), "16");
}

TEST(PlanSendKvcache, AStageHasNoMoreLayersThanItSays) {
  const auto message = [](int64_t first, int64_t end) {
    const SendStage stage{
        .kv = {.prefill_start_layer = first, .total_kv_layers = 8, .hidden_kv_layers = {}},
        .prefill_end_layer = end,
        .pp_size = 2,
        .is_mla = true
    };
    return sent(3, 8, stage, false);
  };
  EXPECT_EQ(message(2, 5), "24");
  EXPECT_EQ(message(2, 6), "24");
  EXPECT_NE(message(2, 4).find("must have at most layers [2, 4)"), std::string::npos);
}

TEST(PlanSendKvcache, ItemLengthsOfEveryEntryAreCompared) {
  const Words src = {0, 100}, dst = {0, 100};
  const Ints page = {0};
  const auto message = [&](const Words& src_lens, const Words& dst_lens) {
    const SendBuffers buffers = buffers_of(src, src_lens, dst, dst_lens);
    return message_of([&] {
      plan_send_kvcache(buffers, {page, page}, {.kv = {.hidden_kv_layers = {}}}, false);
    });
  };
  EXPECT_EQ(message({8, 4}, {8, 4}), "no error");
  EXPECT_EQ(message({8, 4}, {}), "no error");
  EXPECT_EQ(
      message({8, 4}, {4, 4}),
      "plan_send_kvcache: item lengths must be equal, got 8 of source entry 0 and 4 of destination "
      "entry 0"
  );
  EXPECT_NE(message({8, 4}, {8, 8}).find("got 4 of source entry 1"), std::string::npos);
  EXPECT_NE(message({8, 4}, {8}), "no error");
  EXPECT_NE(message({8, 4}, {8, 4, 4}), "no error");
}

TEST(PlanSendKvcacheSlice, NeedsAnItemLengthOfTheDestination) {
  const Words src = {0, 0}, item_lens = {8, 8}, dst = {0, 0};
  const SendBuffers buffers = buffers_of(src, item_lens, dst);
  const Ints page = {0};
  const HeadSlice heads{.num_heads = 1, .src_heads = 1, .dst_heads = 1};
  const auto plan = [&](bool compat) {
    plan_send_kvcache_slice(buffers, {page, page}, 1, heads, {.kv = {}}, compat);
  };
  EXPECT_THROW(plan(/*compat=*/false), std::invalid_argument);
  EXPECT_THROW(plan(/*compat=*/true), std::out_of_range);
}

TEST(PlanSendAux, StopsAtTheShorterListOnlyAsEnginesDo) {
  const Words src = {0}, item_lens = {8}, dst = {0, 0};
  const SendBuffers buffers = buffers_of(src, item_lens, dst);
  const Ints slot = {0};
  EXPECT_THROW(plan_send_aux(buffers, {slot, slot}, false), std::invalid_argument);
  EXPECT_EQ(plan_send_aux(buffers, {slot, slot}, true).num_blocks(), 1);
}

TEST(SliceHeads, ReplicasShareAHead) {
  EXPECT_EQ(slice_heads(4, 8, 3, 2, 0, false).dst_start, 1);
  EXPECT_EQ(slice_heads(2, 1, 0, 4, 3, false).src_start, 1);
  EXPECT_THROW(slice_heads(8, 4, 0, 2, 1, false), std::invalid_argument);
  EXPECT_EQ(slice_heads(8, 4, 0, 2, 1, true).num_heads, 2);
}

TEST(PlanSendAux, ChecksItsBuffers) {
  const Words addrs = {0, 100}, good = {8, 8}, zero = {8, 0}, few = {8};
  const Ints slot = {0};
  const auto message = [&](const Words& item_lens, const Words& data_lens) {
    const SendBuffers buffers = buffers_of(addrs, item_lens, addrs, {}, data_lens);
    return message_of([&] { plan_send_aux(buffers, {slot, slot}, false); });
  };
  EXPECT_EQ(message(good, {}), "no error");
  EXPECT_EQ(message(good, good), "no error");
  EXPECT_EQ(message(zero, {}), "plan_send_aux: source item lengths must be > 0, got 0 of entry 1");
  EXPECT_EQ(
      message(few, {}),
      "plan_send_aux: source must have an item length for each of 2 entries, got 1"
  );
  EXPECT_EQ(
      message(good, few),
      "plan_send_aux: source must have a data length for each of 2 entries, got 1"
  );
}

TEST(SliceHeads, AreThoseThatBothRanksHold) {
  const auto held = [](int64_t heads, int64_t size, int64_t rank) {
    return IndexRange{
        rank * heads / size, std::max(rank * heads / size + 1, (rank + 1) * heads / size)
    };
  };
  for (int64_t heads : {1, 2, 4, 8}) {
    for (int64_t src_size : {1, 2, 4, 8, 16}) {
      for (int64_t dst_size : {1, 2, 4, 8, 16}) {
        std::map<int64_t, std::vector<int>> received;
        for (int64_t src = 0; src < src_size; ++src) {
          for (int64_t dst = 0; dst < dst_size; ++dst) {
            const IndexRange from = held(heads, src_size, src), to = held(heads, dst_size, dst);
            std::vector<int>& counts = received[dst];
            counts.resize(heads);
            HeadSlice slice;
            const std::string message = message_of([&] {
              slice = slice_heads(heads, src_size, src, dst_size, dst, false);
            });
            if (message != "no error") continue;
            const IndexRange both = intersect(from, to);
            EXPECT_EQ(slice.src_heads, from.size());
            EXPECT_EQ(slice.dst_heads, to.size());
            EXPECT_EQ(slice.num_heads, both.size());
            EXPECT_EQ(slice.src_start, both.begin - from.begin);
            EXPECT_EQ(slice.dst_start, both.begin - to.begin);
            for (int64_t head = both.begin; head < both.end; ++head) ++counts[head];
          }
        }
        // Ranks that share a head send it all, as engines do; each gets what it holds.
        for (const auto& [dst, counts] : received) {
          const IndexRange to = held(heads, dst_size, dst);
          for (int64_t head = 0; head < heads; ++head) {
            EXPECT_EQ(counts[head] > 0, to.contains(head)) << src_size << ' ' << dst_size;
          }
        }
      }
    }
  }
}

TEST(SliceHeads, RefusesWhatIsNoRank) {
  constexpr char kRule[] = "slice_heads: heads and ranks must be >= 1, got ";
  const auto message = [](int64_t heads, int64_t src_size, int64_t src, int64_t dst_size,
                          int64_t dst = 0) {
    return message_of([&] { slice_heads(heads, src_size, src, dst_size, dst, false); });
  };
  EXPECT_EQ(message(1, 1, 0, 1), "no error");
  EXPECT_EQ(message(0, 1, 0, 1), kRule + std::string("0, 1 and 1"));
  EXPECT_EQ(message(1, 0, 0, 1), kRule + std::string("1, 0 and 1"));
  EXPECT_EQ(message(1, 1, 0, 0), kRule + std::string("1, 1 and 0"));
  EXPECT_NE(message(1, 1, 1, 1), "no error");
  EXPECT_NE(message(1, 1, -1, 1), "no error");
  const std::string within = "slice_heads: destination rank must be within its 2 ranks, got ";
  EXPECT_EQ(message(2, 1, 0, 2, 2), within + "2");
  EXPECT_EQ(message(2, 1, 0, 2, -1), within + "-1");
  EXPECT_NE(message(4, 3, 0, 1), "no error") << "heads in equal shares";
  EXPECT_NE(message(6, 2, 0, 3), "no error") << "one size divides the other";
}

TEST(PlanSendKvcacheSlice, ATokenOfEachPageForEachEntry) {
  const Words src = {1000}, dst = {5000}, src_lens = {32}, dst_lens = {16};
  const SendBuffers buffers = buffers_of(src, src_lens, dst, dst_lens);
  // Pages of two tokens of four heads and of two, four bytes a head.
  const Ints src_pages = {1}, dst_pages = {3};
  for (const bool compat : {false, true}) {
    const HeadSlice heads = slice_heads(4, 1, 0, 2, 1, compat);
    const TransferPlan plan = plan_send_kvcache_slice(
        buffers, {src_pages, dst_pages}, 2, heads, {.kv = {.hidden_kv_layers = {}}, .is_mla = true},
        compat
    );
    EXPECT_EQ(words(plan.src_addrs()), (Words{1032 + 8, 1032 + 24}));
    EXPECT_EQ(words(plan.dst_addrs()), (Words{5048, 5056}));
    EXPECT_EQ(words(plan.lengths()), (Words{8, 8}));
  }
}

TEST(PlanSendKvcacheSlice, ChecksItsBuffersUnlessItDoesAsEnginesDo) {
  const Words addrs = {0, 100}, dst_lens = {8}, zero = {8, 0}, few = {8};
  const Ints page = {0};
  const auto message = [&](const Words& item_lens, bool compat) {
    const SendBuffers buffers = buffers_of(addrs, item_lens, addrs, dst_lens);
    const HeadSlice heads = slice_heads(1, 1, 0, 1, 0, compat);
    return message_of([&] {
      const SendStage stage{.kv = {.hidden_kv_layers = {}}, .is_mla = true};
      plan_send_kvcache_slice(buffers, {page, page}, 1, heads, stage, compat);
    });
  };
  constexpr char kRule[] = "plan_send_kvcache_slice: source ";
  EXPECT_EQ(
      message(zero, false), kRule + std::string("item lengths must be > 0, got 0 of entry 1")
  );
  EXPECT_EQ(
      message(few, false),
      kRule + std::string("must have an item length for each of 2 entries, got 1")
  );
  EXPECT_EQ(message(zero, true), "no error");
  EXPECT_EQ(message(few, true), "no error");
}

TEST(Concatenate, OnePlanAfterTheOther) {
  const std::vector<TransferRun> runs = {{0, 0, 1}};
  std::vector<TransferPlan> plans;
  for (const uint64_t addr : {8, 16}) {
    const TransferEntry entry{
        .src_addr = addr,
        .dst_addr = 2 * addr,
        .src_stride = 4,
        .dst_stride = 4,
        .bytes = 4,
        .part = addr == 8 ? "k" : "v"
    };
    plans.push_back(make_transfer_plan({&entry, 1}, runs));
  }
  const TransferPlan all = concatenate(plans);
  EXPECT_EQ(words(all.src_addrs()), (Words{8, 16}));
  EXPECT_EQ(words(all.dst_addrs()), (Words{16, 32}));
  EXPECT_EQ(words(all.lengths()), (Words{4, 4}));
  ASSERT_EQ(all.parts().size(), 2u);
  EXPECT_EQ(all.parts()[0].name + all.parts()[1].name, "kv");
  EXPECT_EQ(concatenate({}).num_blocks(), 0u);
}

}  // namespace
}  // namespace cpattn
