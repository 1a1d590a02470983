// SPDX-License-Identifier: Apache-2.0
// The plans of engines' senders from lists of buffers: blocks lie within their items, and every
// item is sent once.
#include "cpattn/transfer/send_kvcache.h"

#include <algorithm>
#include <map>
#include <stdexcept>
#include <utility>
#include <vector>

#include "cpattn/transfer/send_state.h"
#include "fuzz/fuzz.h"
#include "fuzz/intervals.h"

namespace cpattn::fuzz {
namespace {

using Ints = std::vector<int64_t>;
using Words = std::vector<uint64_t>;

struct Lists {
  Words src_addrs, src_data_lens, src_item_lens, dst_addrs, dst_item_lens;
  Ints src_layer_ids, dst_layer_ids;
  SendBuffers buffers() const {
    return {src_addrs,     src_data_lens, src_item_lens, dst_addrs,
            dst_item_lens, src_layer_ids, dst_layer_ids};
  }
  void read_layer_ids(Reader& in) {
    const auto id = [&] { return in.between(0, 3); };
    src_layer_ids = in.list(in.size_near(std::ssize(src_addrs)), id);
    dst_layer_ids = in.list(in.size_near(std::ssize(dst_addrs)), id);
  }
};

struct Input {
  Lists lists;
  Ints src_items, dst_items;
  SendStage stage;
  int64_t page_size = 1;
  HeadSlice heads;
  bool compat = false;
  bool has_data_lens = false;
};

HeadSlice read_heads(Reader& in) {
  const int64_t total = in.one_of({1, 2, 4, 8});
  const int64_t src = in.one_of({1, 2, 4}), dst = in.one_of({1, 2, 4});
  HeadSlice heads = {.num_heads = 1, .src_heads = 1, .dst_heads = 1};
  const int64_t src_rank = in.between(0, src - 1), dst_rank = in.between(0, dst - 1);
  if (const auto slice =
          accepted([&] { return slice_heads(total, src, src_rank, dst, dst_rank, false); })) {
    heads = *slice;
  }
  return heads;
}

Input read_input(Reader& in) {
  Input input;
  input.compat = in.rarely(4);
  input.page_size = in.between(1, 4);
  input.heads = read_heads(in);
  input.has_data_lens = in.flag();
  const auto tokens = static_cast<uint64_t>(input.page_size);
  const uint64_t head_bytes = in.between(1, 3);
  const uint64_t src_item = tokens * head_bytes * input.heads.src_heads;
  const uint64_t dst_item = tokens * head_bytes * input.heads.dst_heads;
  const int64_t num_pages = in.between(1, 6);
  const int64_t num_src = in.between(0, 8);
  const int64_t num_dst = in.flag() ? num_src : in.between(0, 16);
  const auto word = [&in](uint64_t value) {
    return static_cast<uint64_t>(in.mostly(static_cast<int64_t>(value), 128));
  };
  Lists& lists = input.lists;
  for (int64_t i = 0, n = in.size_near(num_src); i < n; ++i) {
    lists.src_addrs.push_back(word((uint64_t{1} << 32) + i * 4096));
  }
  const int64_t size = std::ssize(lists.src_addrs);
  for (int64_t i = in.size_near(size); i > 0; --i) lists.src_item_lens.push_back(word(src_item));
  if (input.has_data_lens) {
    for (int64_t i = in.size_near(size); i > 0; --i) {
      lists.src_data_lens.push_back(word(src_item * num_pages));
    }
  }
  for (int64_t i = 0; i < num_dst; ++i) {
    lists.dst_addrs.push_back(word((uint64_t{1} << 40) + i * 4096));
  }
  if (!in.rarely(8)) {
    for (int64_t i = in.size_near(num_dst); i > 0; --i) {
      lists.dst_item_lens.push_back(word(dst_item));
    }
  }
  const auto page = [&] { return in.mostly(in.between(0, num_pages - 1), 128); };
  const int64_t num_items = in.between(0, 6);
  input.src_items = in.list(num_items, page);
  input.dst_items = in.list(in.size_near(num_items), page);
  input.stage = {
      .kv =
          {.prefill_start_layer = in.mostly(in.between(0, 4)),
           .kv_buf_groups = in.mostly(in.between(1, 3)),
           .total_kv_layers = in.mostly(in.between(0, 6)),
           .hidden_kv_layers = std::nullopt,
           .draft_kv_layers = in.mostly(in.between(0, 1)),
           .is_last_rank = in.flag()},
      .prefill_end_layer = std::nullopt,
      .pp_size = in.mostly(in.between(1, 2)),
      .is_mla = in.flag(),
  };
  if (in.flag()) input.stage.kv.hidden_kv_layers = in.mostly(in.between(0, 6));
  if (in.rarely(4)) input.stage.prefill_end_layer = in.mostly(in.between(0, 8));
  if (in.rarely(4)) input.lists.read_layer_ids(in);
  return input;
}

/// What strict plans promise: blocks of the source within its buffers.
void check_plan(const Input& input, const TransferPlan& plan) {
  std::size_t num_blocks = 0;
  for (const TransferPart& part : plan.parts()) num_blocks += part.num_blocks;
  FUZZ_CHECK(num_blocks == plan.num_blocks());
  if (input.compat) return;
  for (std::size_t i = 0; i < plan.num_blocks(); ++i) {
    const uint64_t addr = plan.src_addrs()[i], length = plan.lengths()[i];
    FUZZ_CHECK(length > 0 && addr + (length - 1) >= addr);
    FUZZ_CHECK(plan.dst_addrs()[i] + (length - 1) >= plan.dst_addrs()[i]);
    if (!input.has_data_lens || input.lists.src_data_lens.empty()) continue;
    bool is_within = false;
    for (std::size_t entry = 0; entry < input.lists.src_addrs.size(); ++entry) {
      const uint64_t size = input.lists.src_data_lens[entry];
      const uint64_t offset = addr - input.lists.src_addrs[entry];
      is_within = is_within || (offset < size && length <= size - offset);
    }
    FUZZ_CHECK(is_within);
  }
}

/// Byte by byte, the blocks of whole items are the copies that the lists ask for.
void check_whole(const Input& input, const TransferPlan& plan) {
  if (input.compat || plan.num_blocks() == 0) return;
  const std::size_t num_items = std::min(input.src_items.size(), input.dst_items.size());
  uint64_t bytes = 0;
  for (const uint64_t item : input.lists.src_item_lens) bytes += item * num_items;
  FUZZ_CHECK(plan.total_bytes() == bytes);
}

/// States find their entries by ids or position, each at most once, and leave out what is empty.
void check_state(Reader& in, const Input& input) {
  Lists lists = input.lists;
  if (in.rarely(2)) lists.read_layer_ids(in);
  const int64_t num_dst = std::ssize(lists.dst_addrs);
  const StateEntries entries{
      .prefill_start_layer = in.mostly(in.between(0, 4)),
      .prefill_end_layer = input.stage.prefill_end_layer,
      .pp_size = input.stage.pp_size,
      .is_flat = !in.flag(),
      .has_dst_item_lens = !input.lists.dst_item_lens.empty(),
      .allow_dst_elision = in.flag()
  };
  const SendBuffers buffers = lists.buffers();
  const SendItems items = {input.src_items, input.dst_items};
  try {
    const auto plan = accepted_but_for<std::runtime_error>([&] {
      return plan_send_state(buffers, items, entries, input.compat);
    });
    if (!plan) return;
    check_plan(input, *plan);
    Ints used = state_entries(buffers, entries, input.compat);
    std::erase(used, kElided);
    for (const int64_t entry : used) FUZZ_CHECK(entry >= 0 && entry < num_dst);
    std::ranges::sort(used);
    FUZZ_CHECK(std::ranges::adjacent_find(used) == used.end());
  } catch (const std::out_of_range&) {
    FUZZ_CHECK(input.compat);
  }
}

/// Engines run off the end of some lists, and so do plans with compat. Layer ids that cannot be
/// paired are a std::runtime_error with compat or without.
template <class Call>
void check(const Input& input, Call call) {
  const auto checked = [&] {
    call();
    return true;
  };
  try {
    accepted_but_for<std::runtime_error>(checked);
  } catch (const std::out_of_range&) {
    FUZZ_CHECK(input.compat);
  }
}

}  // namespace

void run(Reader in) {
  Input input = read_input(in);
  const SendBuffers buffers = input.lists.buffers();
  const SendItems items = {input.src_items, input.dst_items};
  check(input, [&] {
    const TransferPlan plan = plan_send_kvcache(buffers, items, input.stage, input.compat);
    check_plan(input, plan);
    check_whole(input, plan);
    const TransferPlan twice[] = {
        plan_send_kvcache(buffers, items, input.stage, input.compat),
        plan_send_kvcache(buffers, items, input.stage, input.compat)
    };
    const TransferPlan both = concatenate(twice);
    FUZZ_CHECK(both.num_blocks() == 2 * plan.num_blocks());
    FUZZ_CHECK(both.total_bytes() == 2 * plan.total_bytes());
  });
  check(input, [&] {
    const TransferPlan plan = plan_send_aux(buffers, items, input.compat);
    check_plan(input, plan);
    check_whole(input, plan);
  });
  // A block for each token: a page of millions takes gigabytes.
  if (in.rarely()) input.page_size = in.any();
  check_state(in, input);
  if (input.page_size > 4096 && input.page_size <= INT32_MAX) return;
  check(input, [&] {
    check_plan(
        input, plan_send_kvcache_slice(
                   buffers, items, input.page_size, input.heads, input.stage, input.compat
               )
    );
  });
}

}  // namespace cpattn::fuzz
