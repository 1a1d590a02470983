// SPDX-License-Identifier: Apache-2.0
// What layouts refuse, and what plans between two of them do: bounds, in every order of entries.
#include "cpattn/transfer/kv_layout.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "cpattn/transfer/kv_transfer.h"
#include "testing.h"

namespace cpattn {
namespace {

using testing::message_of;
using Ints = std::vector<int64_t>;
using Ranks = std::vector<std::pair<int64_t, int64_t>>;

KVEntry entry_of(int64_t layer, uint64_t addr, uint64_t num_bytes, uint64_t item_len) {
  return {.layer_id = layer, .addr = addr, .num_bytes = num_bytes, .item_len = item_len};
}

std::string placement_message(const KVPlacement& placement) {
  return message_of([&] { KVLayout({}, placement); });
}

TEST(KVLayout, BoundsOfItsPlacement) {
  KVPlacement good{.page_size = 4, .total_kv_heads = 8};
  EXPECT_EQ(placement_message(good), "no error");
  KVPlacement stage = good;
  stage.layers = IndexRange{3, 3};
  EXPECT_EQ(placement_message(stage), "no error") << "a stage may have no layer";
  stage.layers = IndexRange{3, 2};
  EXPECT_EQ(placement_message(stage), "KVLayout: layers must be 0 <= first <= end, got [3, 2)");
  stage.layers = IndexRange{-1, 2};
  EXPECT_EQ(placement_message(stage), "KVLayout: layers must be 0 <= first <= end, got [-1, 2)");

  const auto with = [&](int64_t KVPlacement::* member, int64_t value) {
    KVPlacement placement = good;
    placement.*member = value;
    return placement_message(placement);
  };
  for (const auto member : {&KVPlacement::page_size, &KVPlacement::dcp_interleave}) {
    EXPECT_NE(with(member, 0), "no error");
    EXPECT_EQ(with(member, 1), "no error");
    EXPECT_EQ(with(member, INT32_MAX), "no error");
    EXPECT_NE(with(member, int64_t{INT32_MAX} + 1), "no error");
  }
  EXPECT_EQ(with(&KVPlacement::tp_size, 0), "KVLayout: tp_size must be in [1, 2147483647], got 0");
  EXPECT_EQ(with(&KVPlacement::tp_rank, -1), "KVLayout: tp_rank must be in [0, 1), got -1");
  EXPECT_EQ(with(&KVPlacement::tp_rank, 1), "KVLayout: tp_rank must be in [0, 1), got 1");
  EXPECT_EQ(with(&KVPlacement::dcp_size, INT32_MAX), "no error");
  EXPECT_NE(with(&KVPlacement::dcp_size, int64_t{INT32_MAX} + 1), "no error");
  EXPECT_NE(with(&KVPlacement::dcp_rank, -1), "no error");
  EXPECT_EQ(with(&KVPlacement::shard_size, INT32_MAX), "no error");
  EXPECT_NE(with(&KVPlacement::shard_size, int64_t{INT32_MAX} + 1), "no error");
  EXPECT_EQ(with(&KVPlacement::shard_rank, 1), "KVLayout: shard_rank must be in [0, 1), got 1");
}

TEST(KVLayout, HeadsDivideRanksOrRanksDivideHeads) {
  for (int64_t heads = -1; heads <= 9; ++heads) {
    for (int64_t size = 1; size <= 9; ++size) {
      const std::string message =
          placement_message({.page_size = 1, .tp_size = size, .total_kv_heads = heads});
      const bool good = heads >= 1 && (heads % size == 0 || size % heads == 0);
      EXPECT_EQ(message == "no error", good) << heads << " heads of " << size << " ranks";
    }
  }
  EXPECT_EQ(placement_message({.page_size = 1}), "no error");
  EXPECT_NE(placement_message({.page_size = 1, .tp_size = 2}), "no error");
  EXPECT_EQ(placement_message({.page_size = 1, .total_kv_heads = INT32_MAX}), "no error");
  EXPECT_NE(
      placement_message({.page_size = 1, .total_kv_heads = int64_t{INT32_MAX} + 1}), "no error"
  );
}

TEST(KVLayout, BoundsOfItsEntries) {
  const auto message = [](const KVEntry& entry) {
    return message_of([&] { KVLayout({entry}, {.page_size = 1, .layers = IndexRange{0, 4}}); });
  };
  constexpr uint64_t kMost = INT64_MAX;
  EXPECT_EQ(message(entry_of(0, 0, 0, 1)), "no error");
  EXPECT_EQ(message(entry_of(3, 0, kMost, kMost)), "no error");
  EXPECT_NE(message(entry_of(4, 0, 0, 1)), "no error");
  EXPECT_NE(message(entry_of(-1, 0, 0, 1)), "no error");
  EXPECT_NE(message(entry_of(0, 0, 0, 0)), "no error");
  EXPECT_NE(message(entry_of(0, 0, 0, kMost + 1)), "no error");
  EXPECT_NE(message(entry_of(0, 0, 3, 2)), "no error");
  EXPECT_NE(message(entry_of(0, 0, kMost + 1, 1)), "no error");
  EXPECT_EQ(message(entry_of(0, UINT64_MAX - 7, 8, 8)), "no error") << "its last byte is the last";
  EXPECT_NE(message(entry_of(0, UINT64_MAX - 6, 8, 8)), "no error");
  EXPECT_EQ(message(entry_of(0, UINT64_MAX, 0, 8)), "no error");
  const auto left_out = [&](KVKind kind, uint64_t num_bytes) {
    return message({.kind = kind, .num_bytes = num_bytes});
  };
  for (const KVKind kind : {KVKind::index_k, KVKind::state}) {
    EXPECT_EQ(left_out(kind, 0), "no error");
    EXPECT_NE(left_out(kind, 1), "no error");
  }
  for (const KVKind kind : {KVKind::k, KVKind::v, KVKind::k_scale, KVKind::v_scale}) {
    EXPECT_NE(left_out(kind, 0), "no error");
  }
  EXPECT_EQ(KVEntry{.kind = KVKind::state}.num_pages(), 0);
}

TEST(KVLayout, TellsWhichEntriesAreTheSame) {
  const auto message = [](const std::vector<int64_t>& layers) {
    std::vector<KVEntry> entries;
    entries.reserve(layers.size());
    for (const int64_t layer : layers) entries.push_back(entry_of(layer, 0, 0, 1));
    return message_of([&] { KVLayout(entries, {.page_size = 1}); });
  };
  EXPECT_EQ(message({2, 0, 1}), "no error");
  for (const auto& [layers, indices] : std::vector<std::pair<Ints, std::string>>{
           {{5, 7, 5}, "0 and at index 2"},
           {{7, 5, 5}, "1 and at index 2"},
           {{5, 5, 7}, "0 and at index 1"},
           {{0, 1, 2, 3, 2}, "2 and at index 4"}
       }) {
    EXPECT_NE(message(layers).find("at index " + indices), std::string::npos) << message(layers);
  }
}

/// What a plan says whose destination has buffers at these addresses, of 8 bytes but the last.
std::string overlap_message(const Ints& addrs, uint64_t last_bytes) {
  std::vector<KVEntry> src, dst;
  for (std::size_t i = 0; i < addrs.size(); ++i) {
    const uint64_t bytes = i + 1 == addrs.size() ? last_bytes : 8;
    const auto layer = static_cast<int64_t>(i);
    src.push_back(entry_of(layer, 1000 * (i + 1), 8, 1));
    dst.push_back(entry_of(layer, addrs[i], bytes, 1));
  }
  const KVPlacement placement{.page_size = 1};
  const KVLayout from(src, placement), to(dst, placement);
  return message_of([&] { plan_kv_transfer(from, to, Ints{}, Ints{}, {}); });
}

TEST(PlanKvTransfer, DestinationBuffersAreApartInWhateverOrderTheyAreListed) {
  std::vector<int> order = {0, 1, 2};
  do {
    const auto listed = [&](const Ints& addrs) {
      Ints chosen;
      for (const int i : order) chosen.push_back(addrs[i]);
      return overlap_message(chosen, 8);
    };
    EXPECT_EQ(listed({100, 108, 116}), "no error") << "they may touch";
    EXPECT_NE(listed({100, 107, 116}).find("must not overlap"), std::string::npos);
    EXPECT_NE(listed({100, 100, 116}).find("must not overlap"), std::string::npos);
    EXPECT_NE(listed({100, 500, 503}).find("must not overlap"), std::string::npos);
  } while (std::next_permutation(order.begin(), order.end()));
  EXPECT_EQ(overlap_message({100, 104}, 0), "no error") << "a buffer of no bytes is nowhere";
  EXPECT_NE(overlap_message({100, 104}, 1).find("must not overlap"), std::string::npos);
}

TEST(PlanKvTransfer, StartsAtTheFirstTokenThatBothListsHold) {
  const KVLayout layout({entry_of(0, 0, 64, 4)}, {.page_size = 4});
  const KVLayout other({entry_of(0, 1000, 64, 4)}, {.page_size = 4});
  const Ints src = {0, 1, 2}, dst = {5, 6};  // tokens [0, 12) and [4, 12)
  const TransferPlan plan = plan_kv_transfer(layout, other, src, dst, {.dst_start = 4});
  EXPECT_EQ(plan.total_bytes(), 8U);
  EXPECT_EQ(plan.src_addrs()[0], 4U);
  EXPECT_EQ(plan.dst_addrs()[0], 1000U + 5 * 4);
}

TEST(PlanKvTransfer, AnInterleaveIsOfAGroupAlone) {
  const KVLayout from({entry_of(0, 0, 64, 4)}, {.page_size = 4});
  const KVLayout to({entry_of(0, 1000, 64, 4)}, {.page_size = 4, .dcp_interleave = 64});
  const Ints src = {0, 1, 2}, dst = {5, 6};
  EXPECT_EQ(plan_kv_transfer(from, to, src, dst, {.dst_start = 4}).total_bytes(), 8U);
}

TEST(PlanKvTransfer, PagesOfTheSameHeadsGoWhole) {
  const auto layout = [](uint64_t addr, int64_t tp_size, int64_t heads) {
    const KVPlacement placement{.page_size = 4, .tp_size = tp_size, .total_kv_heads = heads};
    return KVLayout({entry_of(0, addr, 640, 64)}, placement);
  };
  const Ints pages = {0, 2, 3};
  const auto num_blocks = [&](const KVLayout& src, const KVLayout& dst) {
    return plan_kv_transfer(src, dst, pages, pages, {}).num_blocks();
  };
  EXPECT_EQ(num_blocks(layout(0, 2, 4), layout(1000, 2, 4)), 2U) << "shares of one size";
  EXPECT_EQ(num_blocks(layout(0, 1, 2), layout(1000, 1, 4)), 2U) << "all heads, however many";
  EXPECT_EQ(num_blocks(layout(0, 4, 2), layout(1000, 4, 2)), 2U) << "one head each";
}

TEST(PlanKvTransfer, ContextParallelRanksShareOutPagesEvenly) {
  const KVLayout from({entry_of(0, 0, 4000, 4)}, {.page_size = 4});
  const KVLayout to({entry_of(0, 10000, 4000, 4)}, {.page_size = 4});
  Ints pages(40);
  std::iota(pages.begin(), pages.end(), 0);
  for (int64_t num_pages = 1; num_pages < 20; ++num_pages) {
    for (int64_t cp_size = 1; cp_size <= 5; ++cp_size) {
      int64_t sent = 0;
      for (int64_t rank = 0; rank < cp_size; ++rank) {
        const TransferPlan plan = plan_kv_transfer(
            from, to, pages, pages,
            {.first_token = 8, .num_tokens = num_pages * 4, .cp_rank = rank, .cp_size = cp_size}
        );
        const auto count = static_cast<int64_t>(plan.total_bytes() / 4);
        EXPECT_GE(count, num_pages / cp_size) << rank << " of " << cp_size;
        EXPECT_LE(count, (num_pages + cp_size - 1) / cp_size) << rank << " of " << cp_size;
        sent += count;
      }
      EXPECT_EQ(sent, num_pages);
    }
  }
}

TEST(PlanKvTransfer, PagesHoldAtMost2To48Tokens) {
  const KVLayout from({}, {.page_size = 1 << 30}), to({}, {.page_size = 1 << 30});
  const Ints most(1 << 18), more((1 << 18) + 1);
  const auto message = [&](const Ints& src, const Ints& dst) {
    return message_of([&] { plan_kv_transfer(from, to, src, dst, {.num_tokens = 0}); });
  };
  EXPECT_EQ(message(most, most), "no error");
  EXPECT_NE(message(more, most).find("source pages must hold at most 2^48"), std::string::npos);
  EXPECT_NE(message(most, more).find("destination pages must hold"), std::string::npos);
}

TEST(PlanKvTransfer, TokensAndRanksAreBounded) {
  const KVLayout layout({}, {.page_size = 1});
  const auto message = [&](const KVTransferRange& range) {
    return message_of([&] { plan_kv_transfer(layout, layout, Ints{}, Ints{}, range); });
  };
  EXPECT_EQ(message({}), "no error");
  constexpr int64_t kMost = int64_t{1} << 48;
  for (const auto member : {&KVTransferRange::first_token, &KVTransferRange::num_tokens}) {
    for (const int64_t value : {int64_t{-1}, kMost + 1}) {
      KVTransferRange range{.num_tokens = 0};
      range.*member = value;
      const std::string rule = "must be in [0, 2^48], got " + std::to_string(value);
      EXPECT_NE(message(range).find(rule), std::string::npos) << message(range);
    }
  }
  for (const auto& [rank, size] : Ranks{{0, 0}, {-1, 1}, {1, 1}, {0, int64_t{1} << 31}}) {
    EXPECT_NE(message({.num_tokens = 0, .cp_rank = rank, .cp_size = size}), "no error") << rank;
  }
  for (const auto& [rank, size] : Ranks{{0, 1}, {6, 7}, {INT32_MAX - 1, INT32_MAX}}) {
    EXPECT_EQ(message({.num_tokens = 0, .cp_rank = rank, .cp_size = size}), "no error") << rank;
  }
}

TEST(PlanKvLinks, RefusesADestinationThatNothingReaches) {
  const KVLayout layout({entry_of(0, 0, 64, 4)}, {.page_size = 4});
  const Ints pages = {1};
  const std::vector<KVPeer> destinations = {{.layout = &layout, .pages = pages}};
  const std::string message = message_of([&] { plan_kv_links({}, destinations, {}); });
  EXPECT_EQ(
      message,
      "plan_kv_links: k of layer 0 of destination 0, heads [0, 1), tokens [0, 1), must be sent by "
      "one source, got no source"
  );
}

}  // namespace
}  // namespace cpattn
