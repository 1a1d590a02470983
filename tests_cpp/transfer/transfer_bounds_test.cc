// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "cpattn/transfer/kv_pages.h"
#include "cpattn/transfer/kv_pointers.h"
#include "cpattn/transfer/kv_transfer.h"
#include "cpattn/transfer/memory_ranges.h"
#include "cpattn/transfer/send_kvcache.h"
#include "testing.h"

// Numbers at the ends of their types: the largest that fit are planned right, the next are
// refused by name. Under the sanitizers, a sum or product that wraps on the way ends the test.

namespace cpattn {
namespace {

using Ints = std::vector<int64_t>;
using Words = std::vector<uint64_t>;

using testing::message_of;

/// Buffers of one item length on each side.
struct Lists {
  Words src, dst, src_items, dst_items, lens;

  Lists(Words src_addrs, Words dst_addrs, uint64_t src_item, uint64_t dst_item)
      : src(std::move(src_addrs)),
        dst(std::move(dst_addrs)),
        src_items(src.size(), src_item),
        dst_items(dst.size(), dst_item) {}

  SendBuffers buffers() const {
    return {
        .src_addrs = src,
        .src_data_lens = lens,
        .src_item_lens = src_items,
        .dst_addrs = dst,
        .dst_item_lens = dst_items
    };
  }
};

TEST(TransferBounds, ItemsEndAtTheLastAddress) {
  constexpr uint64_t kItem = uint64_t{1} << 62;
  const Lists fits({kItem}, {kItem}, kItem, kItem), shifted({kItem + 1}, {0}, kItem, kItem);
  const Ints first = {0}, third = {2}, fourth = {3};
  const auto plan = [](const Lists& lists, const Ints& src, const Ints& dst) {
    return plan_send_kvcache(lists.buffers(), {src, dst}, {.kv = {.hidden_kv_layers = {}}}, false);
  };
  EXPECT_EQ(plan(fits, third, first).src_addrs()[0], 3 * kItem);  // its end is 2^64
  EXPECT_EQ(plan(fits, first, third).dst_addrs()[0], 3 * kItem);
  EXPECT_EQ(
      message_of([&] { plan(fits, fourth, first); }),
      "plan_send_kvcache: source item 3 of entry 0 lies beyond the address space"
  );
  EXPECT_EQ(
      message_of([&] { plan(fits, first, fourth); }),
      "plan_send_kvcache: destination item 3 of entry 0 lies beyond the address space"
  );
  EXPECT_EQ(
      message_of([&] { plan(shifted, third, first); }),
      "plan_send_kvcache: source item 2 of entry 0 lies beyond the address space"
  );
  const Ints last = {INT64_MAX};  // its successor is no int64, which is what the end is made of
  EXPECT_EQ(
      message_of([&] { plan(fits, last, first); }),
      "plan_send_kvcache: source item 9223372036854775807 of entry 0 lies beyond the address space"
  );
}

TEST(TransferBounds, LayersOfAStageFitIntoInt32) {
  const Lists lists({0, 8}, {0, 8, 16, 24, 32, 40, 48, 56}, 8, 8);
  const Ints page = {0};
  const auto plan = [&](SendStage stage) {
    stage.pp_size = 2;
    stage.kv.total_kv_layers = 4;
    return message_of([&] { plan_send_kvcache(lists.buffers(), {page, page}, stage, false); });
  };
  const auto beyond = [](const char* name, int64_t value) {
    return "plan_send_kvcache: " + std::string(name) + " must fit into int32, got " +
           std::to_string(value);
  };
  const auto stage = [](int64_t start) {
    return SendStage{.kv = {.prefill_start_layer = start, .hidden_kv_layers = {}}};
  };
  for (const int64_t value :
       {INT64_MIN, int64_t{INT32_MIN} - 1, INT32_MAX + int64_t{1}, INT64_MAX}) {
    SendStage ends = stage(1), starts = stage(value), drafts = stage(1), hidden = stage(1);
    ends.prefill_end_layer = value;
    drafts.kv.draft_kv_layers = value;
    hidden.kv.hidden_kv_layers = value;
    EXPECT_EQ(plan(ends), beyond("prefill_end_layer", value));
    EXPECT_EQ(plan(starts), beyond("prefill_start_layer", value));
    EXPECT_EQ(plan(drafts), beyond("draft_kv_layers", value));
    EXPECT_EQ(plan(hidden), beyond("hidden_kv_layers", value));
  }
  SendStage ends = stage(1);
  ends.prefill_end_layer = INT32_MAX;
  EXPECT_EQ(plan(ends), "no error");
  ends.prefill_end_layer = INT32_MIN;
  EXPECT_NE(plan(ends), "no error");
}

TEST(TransferBounds, BytesOfTheHeadsOfAPageFitIntoAWord) {
  const Ints page = {0};
  const auto plan = [&](int64_t src_heads, uint64_t src_item) {
    const Lists lists({0}, {0}, src_item, 4);
    const HeadSlice heads = {.num_heads = 1, .src_heads = src_heads, .dst_heads = 1};
    const SendStage stage = {.kv = {.hidden_kv_layers = {}}};
    return message_of([&] {
      plan_send_kvcache_slice(lists.buffers(), {page, page}, 2, heads, stage, false);
    });
  };
  EXPECT_EQ(plan((int64_t{1} << 62) - 1, UINT64_MAX - 3), "no error");  // 2^64 - 4 bytes
  EXPECT_EQ(
      plan(int64_t{1} << 62, 4),
      "plan_send_kvcache_slice: source items of 4611686018427387904 heads of 2 tokens of 2 bytes "
      "must be below 2^64"
  );
  // 4 * (2^62 + 1) is 4 modulo 2^64, the length that is announced.
  EXPECT_NE(plan((int64_t{1} << 62) + 1, 4), "no error");
}

TEST(TransferBounds, BlocksOfASliceAreCounted) {
  const Lists lists(Words(64, 0), Words(64, 0), uint64_t{2} * INT32_MAX, INT32_MAX);
  const Ints page = {0};
  const HeadSlice heads = {.num_heads = 1, .src_heads = 2, .dst_heads = 1};
  const SendStage stage = {.kv = {.hidden_kv_layers = {}}};
  EXPECT_EQ(
      message_of([&] {
        plan_send_kvcache_slice(lists.buffers(), {page, page}, INT32_MAX, heads, stage, false);
      }),
      "TransferPlan: a plan must have at most 268435456 blocks, got 17179869248 for 64 buffers: "
      "their units are sent one by one"
  );
}

TEST(TransferBounds, PagesOfASequenceHoldAtMostTwoToThe48Tokens) {
  const uint64_t item = INT32_MAX;
  const KVLayout layout(
      {{.addr = 0, .num_bytes = item, .item_len = item}}, {.page_size = INT32_MAX}
  );
  // The page ids come after the count: all but the first are outside of the buffer.
  const auto plan = [&](std::size_t num_pages) {
    const Ints pages(num_pages, 1);
    return message_of([&] { plan_kv_transfer(layout, layout, pages, pages, {}); });
  };
  EXPECT_EQ(
      plan(1 << 17),
      "plan_kv_transfer: source pages must be in [0, 1) for k of layer 0, got 1 at index 0"
  );
  EXPECT_EQ(
      plan((1 << 17) + 1),
      "plan_kv_transfer: source pages must hold at most 2^48 tokens, got 131073 of 2147483647"
  );
}

TEST(TransferBounds, TokensOfARangeAreBoundedBeforeTheyAreAdded) {
  const KVLayout layout({{.addr = 0, .num_bytes = 8, .item_len = 1}}, {.page_size = 1});
  const Ints pages = {0};
  for (const int64_t value : {INT64_MIN, int64_t{-1}, (int64_t{1} << 48) + 1, INT64_MAX}) {
    const auto plan = [&](const KVTransferRange& range) {
      return message_of([&] { plan_kv_transfer(layout, layout, pages, pages, range); });
    };
    const auto rule = [value](const char* name) {
      return "plan_kv_transfer: " + std::string(name) + " must be in [0, 2^48], got " +
             std::to_string(value);
    };
    EXPECT_EQ(plan({.src_start = value}), rule("src_start"));
    EXPECT_EQ(plan({.dst_start = value}), rule("dst_start"));
    EXPECT_EQ(plan({.first_token = value}), rule("first_token"));
    EXPECT_EQ(plan({.num_tokens = value}), rule("num_tokens"));
  }
  EXPECT_EQ(
      message_of([&] {
        plan_kv_transfer(
            layout, layout, pages, pages,
            {.first_token = int64_t{1} << 48, .num_tokens = int64_t{1} << 48}
        );
      }),
      "plan_kv_transfer: source pages must hold tokens [281474976710656, 562949953421312), got 1 "
      "of 1 from 0 on"
  );
}

TEST(TransferBounds, EntriesEndAtTheLastAddress) {
  const auto layout = [](uint64_t addr, uint64_t num_bytes, uint64_t item_len) {
    return message_of([&] {
      KVLayout({{.addr = addr, .num_bytes = num_bytes, .item_len = item_len}}, {.page_size = 1});
    });
  };
  constexpr uint64_t kHalf = uint64_t{1} << 63;
  EXPECT_EQ(layout(UINT64_MAX - 7, 8, 8), "no error");
  EXPECT_EQ(layout(UINT64_MAX, 0, 8), "no error");
  EXPECT_NE(layout(UINT64_MAX - 6, 8, 8).find("addr + nbytes of k of layer 0"), std::string::npos);
  EXPECT_EQ(layout(kHalf, kHalf - 1, kHalf - 1), "no error");
  EXPECT_NE(layout(0, kHalf, kHalf).find("must be in [1, 2^63)"), std::string::npos);
  EXPECT_NE(layout(0, kHalf, 1).find("below 2^63, got 9223372036854775808"), std::string::npos);
  EXPECT_NE(layout(0, 8, 0).find("must be in [1, 2^63), got 0"), std::string::npos);
}

TEST(TransferBounds, EntriesArePairedWithinMemory) {
  constexpr int64_t kMost = int64_t{1} << 24;
  const auto pair = [](int64_t num_src, int64_t num_dst) {
    return message_of([&] { build_transfer_entry_pairs({}, {}, num_src, num_dst, true); });
  };
  EXPECT_EQ(pair(0, kMost), "no error");
  for (const int64_t value : {kMost + 1, INT64_MAX, int64_t{-1}, INT64_MIN}) {
    const std::string rule =
        "build_transfer_entry_pairs: n_src and n_dst must be in [0, 16777216], got ";
    EXPECT_EQ(pair(value, 1), rule + std::to_string(value) + " and 1");
    EXPECT_EQ(pair(1, value), rule + "1 and " + std::to_string(value));
  }
}

TEST(TransferBounds, SlotsAreCountedInPagesWithoutWrapping) {
  EXPECT_EQ(kv_to_page_num(INT64_MAX, 1), INT64_MAX);
  EXPECT_EQ(kv_to_page_num(INT64_MAX, INT64_MAX), 1);
  EXPECT_EQ(kv_to_page_num(INT64_MAX, INT64_MAX - 1), 2);
  const Ints slots = {INT64_MAX, INT64_MAX};
  EXPECT_EQ(kv_to_page_indices(slots, INT64_MAX), (std::vector<int32_t>{1}));
  EXPECT_EQ(
      message_of([&] { kv_to_page_indices(slots, 1); }),
      "kv_to_page_indices: pages must fit into int32, got 9223372036854775807"
  );
}

TEST(TransferBounds, RegisteredRangesEndAtTheLastAddress) {
  MemoryRanges ranges;
  EXPECT_EQ(ranges.add(Words{UINT64_MAX}, Words{1}), 0);
  EXPECT_EQ(ranges.add(Words{0}, Words{UINT64_MAX}), 0);  // all other addresses
  EXPECT_EQ(ranges.add(Words{1}, Words{UINT64_MAX}), MemoryRanges::kOverlap);
  EXPECT_EQ(ranges.add(Words{2}, Words{UINT64_MAX}), MemoryRanges::kInvalid);
  EXPECT_TRUE(ranges.contain(Words{UINT64_MAX, 0}, Words{1, UINT64_MAX}));
  EXPECT_FALSE(ranges.contain(Words{UINT64_MAX}, Words{2}));      // wraps to address 0
  EXPECT_FALSE(ranges.contain(Words{UINT64_MAX - 1}, Words{2}));  // across two ranges
  EXPECT_FALSE(ranges.contain(Words{1}, Words{UINT64_MAX}));
}

}  // namespace
}  // namespace cpattn
