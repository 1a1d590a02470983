// SPDX-License-Identifier: Apache-2.0
#include "cpattn/transfer/send_kvcache.h"

#include <algorithm>
#include <numeric>

#include "cpattn/transfer/kv_pages.h"
#include "meta/transfer/send_buffers.h"

namespace cpattn {
namespace {

void check_dst_item_lens(
    const char* function, const SendBuffers& buffers, std::span<const int64_t> dst_entries
) {
  if (buffers.dst_item_lens.empty()) return;
  check(
      buffers.dst_item_lens.size() == buffers.dst_addrs.size(), function,
      ": destination must have an item length for each of ", buffers.dst_addrs.size(),
      " entries, got ", buffers.dst_item_lens.size()
  );
  for (std::size_t i = 0; i < dst_entries.size(); ++i) {
    check(
        buffers.dst_item_lens[dst_entries[i]] == buffers.src_item_lens[i], function,
        ": item lengths must be equal, got ", buffers.src_item_lens[i], " of source entry ", i,
        " and ", buffers.dst_item_lens[dst_entries[i]], " of destination entry ", dst_entries[i]
    );
  }
}

/// Drops entries without a length from lists with layer ids: engines send nothing for them. Strict
/// plans have no such entries.
void leave_out_elided(const SendBuffers& buffers, std::vector<int64_t>& dst_entries) {
  if (!has_layer_ids(buffers)) return;
  const std::size_t known = std::min(dst_entries.size(), buffers.src_item_lens.size());
  for (std::size_t i = 0; i < known; ++i) {
    if (buffers.src_item_lens[i] == 0) dst_entries[i] = kElided;
  }
}

TransferPlan plan_whole_items(
    const char* function,
    const SendBuffers& buffers,
    const SendItems& items,
    std::span<const int64_t> dst_entries,
    const auto& part
) {
  std::vector<TransferEntry> entries;
  entries.reserve(dst_entries.size());
  for (std::size_t i = 0; i < dst_entries.size(); ++i) {
    if (dst_entries[i] < 0) continue;
    const uint64_t bytes = at(buffers.src_item_lens, i, function, "item lengths");
    entries.push_back(
        {.src_addr = buffers.src_addrs[i],
         .dst_addr = buffers.dst_addrs[dst_entries[i]],
         .src_stride = bytes,
         .dst_stride = bytes,
         .bytes = bytes,
         .part = part(i)}
    );
  }
  return make_transfer_plan(entries, group_runs(items.src, items.dst));
}

}  // namespace

TransferPlan plan_send_kvcache(
    const SendBuffers& buffers, const SendItems& pages, const SendStage& stage, bool compat
) {
  constexpr char kFunction[] = "plan_send_kvcache";
  if (!compat) check_buffers(kFunction, buffers);
  std::vector<int64_t> dst_entries = destination_entries(kFunction, buffers, stage, compat);
  if (compat) {
    leave_out_elided(buffers, dst_entries);
  } else {
    check_dst_item_lens(kFunction, buffers, dst_entries);
    check_items(kFunction, buffers, pages, dst_entries, buffers.src_item_lens);
  }
  return plan_whole_items(kFunction, buffers, pages, dst_entries, [&](std::size_t i) {
    return part_of(i, dst_entries.size(), stage);
  });
}

TransferPlan plan_paired_items(
    const char* function,
    const char* what,
    const SendBuffers& buffers,
    const SendItems& items,
    std::span<const int64_t> dst_entries,
    bool compat
) {
  SendItems sent = items;
  if (compat) {
    const std::size_t count = std::min(items.src.size(), items.dst.size());
    sent = {items.src.first(count), items.dst.first(count)};
  } else {
    check(
        items.src.size() == items.dst.size(), function, ": ", what,
        " indices must be as many on both sides, got ", items.src.size(), " of the source and ",
        items.dst.size(), " of the destination"
    );
    check_items(function, buffers, items, dst_entries, buffers.src_item_lens);
  }
  return plan_whole_items(function, buffers, sent, dst_entries, [what](std::size_t) {
    return what;
  });
}

TransferPlan plan_send_aux(const SendBuffers& buffers, const SendItems& items, bool compat) {
  constexpr char kFunction[] = "plan_send_aux";
  const std::size_t num_src = buffers.src_addrs.size();
  const std::size_t num_dst = buffers.dst_addrs.size();
  std::vector<int64_t> dst_entries(std::min(num_src, num_dst));
  std::iota(dst_entries.begin(), dst_entries.end(), int64_t{0});
  if (!compat) {
    check_buffers(kFunction, buffers);
    check(
        num_src == num_dst, kFunction, ": aux buffers must be as many on both sides, got ", num_src,
        " of the source and ", num_dst, " of the destination"
    );
    check_dst_item_lens(kFunction, buffers, dst_entries);
  }
  return plan_paired_items(kFunction, "aux", buffers, items, dst_entries, compat);
}

TransferPlan concatenate(std::span<const TransferPlan> plans) {
  std::size_t num_blocks = 0;
  for (const TransferPlan& plan : plans) num_blocks += plan.num_blocks();
  TransferPlan all(num_blocks);
  std::vector<TransferPart> parts;
  std::size_t begin = 0;
  for (const TransferPlan& plan : plans) {
    std::ranges::copy(plan.src_addrs(), all.src_addrs().begin() + begin);
    std::ranges::copy(plan.dst_addrs(), all.dst_addrs().begin() + begin);
    std::ranges::copy(plan.lengths(), all.lengths().begin() + begin);
    parts.insert(parts.end(), plan.parts().begin(), plan.parts().end());
    begin += plan.num_blocks();
  }
  all.set_parts(std::move(parts));
  return all;
}

}  // namespace cpattn
