// SPDX-License-Identifier: Apache-2.0
#include "cpattn/transfer/send_state.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>

#include "meta/transfer/send_buffers.h"

namespace cpattn {
namespace {

constexpr char kFunction[] = "plan_send_state";
constexpr CheckFor require(kFunction);

/// Engines cut lists of pointers and lists of lengths separately by this rule: a list as long as
/// the source's is its own; of a longer list, entries from the stage's first layer on are.
IndexRange cut(int64_t num_src, int64_t num_dst, int64_t start) {
  if (num_src == num_dst) return {0, num_dst};
  return {std::min(start, num_dst), std::min(start + num_src, num_dst)};
}

int64_t start_layer(const StateEntries& entries) {
  const int64_t start = entries.prefill_start_layer.value_or(0);
  require(start >= 0, "prefill_start_layer must be >= 0, got ", start);
  return narrow_to_int32(start, "plan_send_state: prefill_start_layer");
}

/// Drafts are the tail of both lists, on the last stage, and equally many on both sides.
void check_cut(int64_t num_src, int64_t num_dst, const StateEntries& entries) {
  require(
      entries.is_flat, "state buffers must be as many on both sides, got ", num_src,
      " of the source and ", num_dst, " of the destination"
  );
  require(
      entries.prefill_start_layer.has_value(), "kv_args must have prefill_start_layer where state ",
      "buffers are not as many on both sides, got ", num_src, " of the source and ", num_dst,
      " of the destination"
  );
  const int64_t start = start_layer(entries);
  require(
      num_dst >= num_src && start <= num_dst - num_src, "destination must have the state buffers ",
      IndexRange{start, start + num_src}, " of the source's layers, got ", num_dst
  );
  if (!entries.prefill_end_layer) return;
  const int64_t end =
      narrow_to_int32(*entries.prefill_end_layer, "plan_send_state: prefill_end_layer");
  const int64_t drafts = num_src - (end - start);
  require(
      drafts <= 0 || num_dst == end + drafts, "destination must have the ", drafts,
      " draft buffers of the source behind its ", end, " layers, got ", num_dst, " buffers"
  );
}

/// The destination entry of each source entry, for lists without ids.
std::vector<int64_t> by_position(
    int64_t num_src, int64_t num_dst, const StateEntries& entries, bool compat
) {
  if (!compat && num_src != num_dst) check_cut(num_src, num_dst, entries);
  if (!entries.is_flat) num_src = std::min(num_src, num_dst);
  const IndexRange range =
      entries.is_flat ? cut(num_src, num_dst, start_layer(entries)) : IndexRange{0, num_src};
  if (range.size() < num_src) {
    throw std::out_of_range(concat(
        kFunction, ": list index out of range: ", range.size(), " destination entries for ",
        num_src, " of the source"
    ));
  }
  std::vector<int64_t> found(num_src);
  std::iota(found.begin(), found.end(), range.begin);
  return found;
}

void check_lists(const SendBuffers& buffers, const StateEntries& entries) {
  check_list_sizes(kFunction, buffers);
  require(
      !entries.has_dst_item_lens || buffers.dst_item_lens.size() == buffers.dst_addrs.size(),
      "destination must have an item length for each of ", buffers.dst_addrs.size(),
      " entries, got ", buffers.dst_item_lens.size()
  );
}

}  // namespace

std::vector<int64_t> state_entries(
    const SendBuffers& buffers, const StateEntries& entries, bool compat
) {
  const int64_t num_src = std::ssize(buffers.src_addrs);
  const int64_t num_dst = std::ssize(buffers.dst_addrs);
  const bool has_ids = has_layer_ids(buffers);
  require(entries.pp_size >= 1, "pp_size must be >= 1, got ", entries.pp_size);
  if (!compat) check_lists(buffers, entries);
  std::vector<int64_t> found = has_ids ? entries_by_ids(buffers, entries.pp_size)
                                       : by_position(num_src, num_dst, entries, compat);
  const std::span<const uint64_t> dst_lens = buffers.dst_item_lens;
  const bool is_cut = !has_ids && entries.is_flat;
  const IndexRange lens = is_cut ? cut(num_src, std::ssize(dst_lens), start_layer(entries))
                                 : IndexRange{0, std::ssize(dst_lens)};
  for (std::size_t i = 0; i < found.size(); ++i) {
    const uint64_t src_len = at(buffers.src_item_lens, i, kFunction, "item lengths");
    uint64_t dst_len = src_len;
    if (entries.has_dst_item_lens) {
      const int64_t entry = is_cut ? lens.begin + static_cast<int64_t>(i) : found[i];
      require(
          entry < lens.end, "destination must have an item length for its entry ", found[i],
          ", got ", dst_lens.size()
      );
      dst_len = dst_lens[entry];
    }
    if (src_len == 0 || (dst_len == 0 && entries.allow_dst_elision)) {
      found[i] = kElided;
      continue;
    }
    require(
        src_len == dst_len, "item lengths must be equal, got ", src_len, " of source entry ", i,
        " and ", dst_len, " of destination entry ", found[i]
    );
  }
  return found;
}

TransferPlan plan_send_state(
    const SendBuffers& buffers, const SendItems& items, const StateEntries& entries, bool compat
) {
  const std::vector<int64_t> dst_entries = state_entries(buffers, entries, compat);
  return plan_paired_items(kFunction, "state", buffers, items, dst_entries, compat);
}

}  // namespace cpattn
