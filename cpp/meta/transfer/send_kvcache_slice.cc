// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "cpattn/transfer/kv_pages.h"
#include "meta/transfer/send_buffers.h"

namespace cpattn {
namespace {

/// The number of heads of a rank; with more ranks than heads, neighbours share a head.
int64_t heads_of(const char* side, int64_t total_kv_heads, int64_t tp_size, bool compat) {
  check(
      compat || total_kv_heads % tp_size == 0 || tp_size % total_kv_heads == 0,
      "slice_heads: ", side, " ranks must have equal shares of ", total_kv_heads, " heads, got ",
      tp_size, " ranks"
  );
  return std::max<int64_t>(1, total_kv_heads / tp_size);
}

void check_rank(const char* side, int64_t rank, int64_t tp_size) {
  check(
      rank >= 0 && rank < tp_size, "slice_heads: ", side, " rank must be within its ", tp_size,
      " ranks, got ", rank
  );
}

/// Bytes of a head of a token.
uint64_t head_bytes(
    const char* function,
    const SendBuffers& buffers,
    uint64_t page_size,
    const HeadSlice& heads,
    bool compat
) {
  check(
      compat || !buffers.dst_item_lens.empty(), function,
      ": destination must have an item length, got none"
  );
  const uint64_t dst_item = at(buffers.dst_item_lens, 0, function, "destination item lengths");
  const uint64_t bytes = dst_item / page_size / static_cast<uint64_t>(heads.dst_heads);
  if (compat) return bytes;
  check(
      bytes > 0 && bytes * page_size * static_cast<uint64_t>(heads.dst_heads) == dst_item, function,
      ": destination item length must be a whole number of bytes for each of ", page_size,
      " tokens and ", heads.dst_heads, " heads, got ", dst_item
  );
  uint64_t src_item = 0;
  check(
      !__builtin_mul_overflow(bytes * page_size, static_cast<uint64_t>(heads.src_heads), &src_item),
      function, ": source items of ", heads.src_heads, " heads of ", page_size, " tokens of ",
      bytes, " bytes must be below 2^64"
  );
  const auto other = std::ranges::find_if(buffers.src_item_lens, [src_item](uint64_t item) {
    return item != src_item;
  });
  check(
      other == buffers.src_item_lens.end(), function, ": source item lengths must be ", src_item,
      " for ", heads.src_heads, " heads where the destination's are ", dst_item, " for ",
      heads.dst_heads, ", got ", other == buffers.src_item_lens.end() ? 0 : *other, " of entry ",
      other - buffers.src_item_lens.begin()
  );
  return bytes;
}

}  // namespace

HeadSlice slice_heads(
    int64_t total_kv_heads,
    int64_t src_tp_size,
    int64_t src_rank,
    int64_t dst_tp_size,
    int64_t dst_rank,
    bool compat
) {
  check(
      total_kv_heads >= 1 && src_tp_size >= 1 && dst_tp_size >= 1,
      "slice_heads: heads and ranks must be >= 1, got ", total_kv_heads, ", ", src_tp_size, " and ",
      dst_tp_size
  );
  check(
      compat || src_tp_size % dst_tp_size == 0 || dst_tp_size % src_tp_size == 0,
      "slice_heads: one of the sizes must divide the other, got ", src_tp_size, " source and ",
      dst_tp_size, " destination ranks"
  );
  check_rank("source", src_rank, src_tp_size);
  check_rank("destination", dst_rank, dst_tp_size);
  const int64_t src_heads = heads_of("source", total_kv_heads, src_tp_size, compat);
  const int64_t dst_heads = heads_of("destination", total_kv_heads, dst_tp_size, compat);
  HeadSlice slice{.src_heads = src_heads, .dst_heads = dst_heads};
  bool meets = false;
  if (src_tp_size > dst_tp_size) {
    const int64_t replicas = std::max<int64_t>(1, src_tp_size / total_kv_heads);
    slice.num_heads = src_heads;
    slice.dst_start = src_rank / replicas * src_heads % dst_heads;
    meets = src_rank / (src_tp_size / dst_tp_size) == dst_rank;
  } else {
    const int64_t replicas = std::max<int64_t>(1, dst_tp_size / total_kv_heads);
    slice.num_heads = dst_heads;
    slice.src_start = dst_rank / replicas * dst_heads % src_heads;
    meets = dst_rank / (dst_tp_size / src_tp_size) == src_rank;
  }
  check(
      meets || compat, "slice_heads: source rank ", src_rank, " of ", src_tp_size,
      " has nothing for destination rank ", dst_rank, " of ", dst_tp_size
  );
  return slice;
}

TransferPlan plan_send_kvcache_slice(
    const SendBuffers& buffers,
    const SendItems& pages,
    int64_t page_size,
    const HeadSlice& heads,
    const SendStage& stage,
    bool compat
) {
  constexpr char kFunction[] = "plan_send_kvcache_slice";
  check(page_size >= 1, kFunction, ": page_size must be >= 1, got ", page_size);
  narrow_to_int32(page_size, "plan_send_kvcache_slice: page_size");  // counts of tokens fit
  if (!compat) check_buffers(kFunction, buffers);
  const std::vector<int64_t> dst_entries = destination_entries(kFunction, buffers, stage, compat);
  if (dst_entries.empty()) return {};
  const auto tokens = static_cast<uint64_t>(page_size);
  const uint64_t bytes = head_bytes(kFunction, buffers, tokens, heads, compat);
  const uint64_t dst_item = buffers.dst_item_lens[0];
  if (!compat) {
    const std::vector<uint64_t> dst_items(dst_entries.size(), dst_item);
    check_items(kFunction, buffers, pages, dst_entries, dst_items);
  }
  const uint64_t src_item = at(buffers.src_item_lens, 0, kFunction, "item lengths");
  std::vector<TransferEntry> entries;
  entries.reserve(dst_entries.size());
  for (std::size_t i = 0; i < dst_entries.size(); ++i) {
    entries.push_back(
        {.src_addr = buffers.src_addrs[i] + static_cast<uint64_t>(heads.src_start) * bytes,
         .dst_addr =
             buffers.dst_addrs[dst_entries[i]] + static_cast<uint64_t>(heads.dst_start) * bytes,
         .src_stride = src_item / tokens,
         .dst_stride = dst_item / tokens,
         .bytes = static_cast<uint64_t>(heads.num_heads) * bytes,
         .part = part_of(i, dst_entries.size(), stage)}
    );
  }
  std::vector<TransferRun> runs = group_runs(pages.src, pages.dst);
  const auto first_token = [tokens](int64_t page) {  // modulo 2^64, as addresses
    return static_cast<int64_t>(static_cast<uint64_t>(page) * tokens);
  };
  for (TransferRun& run : runs) {  // of pages, now of tokens
    run = {first_token(run.src), first_token(run.dst), run.count * page_size};
  }
  return make_transfer_plan(entries, runs);
}

}  // namespace cpattn
