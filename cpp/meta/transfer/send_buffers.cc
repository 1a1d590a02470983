// SPDX-License-Identifier: Apache-2.0
#include "meta/transfer/send_buffers.h"

#include <algorithm>
#include <array>
#include <unordered_map>

namespace cpattn {
namespace {

std::vector<IndexRange> mha_as_engines_do(
    const char* function, int64_t num_src, int64_t num_dst, const KVStage& stage
) {
  const MhaEntries entries = mha_kv_entries(num_src, num_dst, stage.prefill_start_layer, 0, true);
  for (const IndexRange& range : {entries.dst_k, entries.dst_v}) {
    if (range.size() < entries.num_layers) {
      throw std::out_of_range(concat(
          function, ": list index out of range: ", range.size(), " destination entries for ",
          entries.num_layers, " layers"
      ));
    }
  }
  const int64_t n = entries.num_layers;
  return {
      {entries.dst_k.begin, entries.dst_k.begin + n}, {entries.dst_v.begin, entries.dst_v.begin + n}
  };
}

/// Returns the stage with the number of groups in its lists: MHA senders have K and V, but never
/// declare them.
KVStage grouped(const SendStage& stage) {
  KVStage kv = stage.kv;
  if (!stage.is_mla) {
    kv.kv_buf_groups = 2;
    kv.hidden_kv_layers = kv.hidden_kv_layers.value_or(kv.total_kv_layers);
  }
  return kv;
}

/// The declared draft layers of a sender that has the whole model.
int64_t num_drafts(int64_t num_src, const KVStage& stage) {
  const int64_t targets = stage.hidden_kv_layers.value_or(stage.total_kv_layers);
  const int64_t beyond = targets > 0 ? num_src / stage.kv_buf_groups - targets : 0;
  return std::max(stage.draft_kv_layers, beyond);
}

/// Pairs the lists of a sender that has the whole model.
std::vector<IndexRange> by_position(
    const char* function, int64_t num_src, int64_t num_dst, const KVStage& stage, bool compat
) {
  const int64_t drafts = num_drafts(num_src, stage);
  check(
      compat || num_dst >= num_src, function, ": destination must have the ", num_src,
      " entries of the source, got ", num_dst
  );
  check(
      compat || num_src == num_dst || drafts == 0, function, ": destination must have the ", drafts,
      " drafts of the source, got ", num_dst, " entries for ", num_src
  );
  return {{0, std::min(num_src, num_dst)}};
}

/// Undeclared groups make a stage look longer than it is.
void check_end_layer(
    const char* function, int64_t num_src, const KVStage& kv, std::optional<int64_t> end_layer
) {
  if (!end_layer) return;
  narrow_to_int32(*end_layer, concat(function, ": prefill_end_layer").c_str());
  const int64_t drafts = kv.is_last_rank ? kv.draft_kv_layers : 0;
  const int64_t held = num_src / kv.kv_buf_groups - drafts;
  check(
      held <= *end_layer - kv.prefill_start_layer, function, ": source must have at most layers [",
      kv.prefill_start_layer, ", ", *end_layer, ") in each of ", kv.kv_buf_groups,
      " group(s), got ", num_src, " entries with ", drafts, " drafts"
  );
}

std::vector<IndexRange> destination_ranges(
    const char* function, const SendBuffers& buffers, const SendStage& stage, bool compat
) {
  const auto num_src = std::ssize(buffers.src_addrs);
  const auto num_dst = std::ssize(buffers.dst_addrs);
  const KVStage kv = grouped(stage);
  if (stage.pp_size == 1) return by_position(function, num_src, num_dst, kv, compat);
  if (!compat) {
    std::vector<IndexRange> ranges = match_kv_entries(function, num_src, num_dst, kv);
    check_end_layer(function, num_src, kv, stage.prefill_end_layer);
    return ranges;
  }
  if (stage.is_mla) return mla_kv_entries(num_src, num_dst, stage.kv, true);
  return mha_as_engines_do(function, num_src, num_dst, stage.kv);
}

/// K and V of a layer have one id. If the source had a layer less often, the destination would be
/// told that the whole layer had come.
void check_equally_often(const char* function, const SendBuffers& buffers) {
  std::unordered_map<int64_t, int64_t> missing;
  for (const int64_t layer : buffers.src_layer_ids) --missing[layer];
  for (const int64_t layer : buffers.dst_layer_ids) {
    if (const auto found = missing.find(layer); found != missing.end()) ++found->second;
  }
  for (const int64_t layer : buffers.src_layer_ids) {
    check(
        missing[layer] == 0, function, ": source must have layer ", layer,
        " as often as the destination, got ", missing[layer], " fewer"
    );
  }
}

/// Checks that the end of the last item is an address.
void check_end(
    const char* function,
    const char* side,
    std::size_t entry,
    uint64_t addr,
    uint64_t item_len,
    int64_t last
) {
  uint64_t end = 0;
  check(
      !__builtin_mul_overflow(static_cast<uint64_t>(last) + 1, item_len, &end) &&
          !__builtin_add_overflow(end, addr - (addr > 0), &end),
      function, ": ", side, " item ", last, " of entry ", entry, " lies beyond the address space"
  );
}

int64_t last_item(const char* function, const char* side, std::span<const int64_t> items) {
  const auto [low, high] = std::ranges::minmax_element(items);
  check(
      *low >= 0, function, ": ", side, " indices must be >= 0, got ", *low, " at index ",
      low - items.begin()
  );
  return *high;
}

}  // namespace

void check_list_sizes(const char* function, const SendBuffers& buffers) {
  const std::size_t num_src = buffers.src_addrs.size();
  check(
      buffers.src_item_lens.size() == num_src, function, ": source must have an item length for ",
      "each of ", num_src, " entries, got ", buffers.src_item_lens.size()
  );
  check(
      buffers.src_data_lens.empty() || buffers.src_data_lens.size() == num_src, function,
      ": source must have a data length for each of ", num_src, " entries, got ",
      buffers.src_data_lens.size()
  );
}

void check_buffers(const char* function, const SendBuffers& buffers) {
  check_list_sizes(function, buffers);
  const auto zero = std::ranges::find(buffers.src_item_lens, uint64_t{0});
  check(
      zero == buffers.src_item_lens.end(), function, ": source item lengths must be > 0, got 0 of ",
      "entry ", zero - buffers.src_item_lens.begin()
  );
}

std::vector<int64_t> entries_by_ids(const SendBuffers& buffers, int64_t pp_size) {
  std::vector<int64_t> entries(buffers.src_addrs.size());
  const auto pairs = build_transfer_entry_pairs(
      buffers.src_layer_ids, buffers.dst_layer_ids, std::ssize(buffers.src_addrs),
      std::ssize(buffers.dst_addrs), pp_size == 1
  );
  for (const auto& [src, dst] : pairs) entries[src] = dst;
  return entries;
}

std::vector<int64_t> destination_entries(
    const char* function, const SendBuffers& buffers, const SendStage& stage, bool compat
) {
  check(stage.pp_size >= 1, function, ": pp_size must be >= 1, got ", stage.pp_size);
  const int64_t groups = grouped(stage).kv_buf_groups;
  check(groups >= 1, function, ": kv_buf_groups must be >= 1, got ", groups);
  const bool both_say = !buffers.src_layer_ids.empty() && !buffers.dst_layer_ids.empty();
  // With one stage a strict plan checks lists that pair by position like lists without ids.
  if (has_layer_ids(buffers) && (both_say || compat || stage.pp_size > 1)) {
    std::vector<int64_t> entries = entries_by_ids(buffers, stage.pp_size);
    if (!compat) check_equally_often(function, buffers);
    return entries;
  }
  std::vector<int64_t> entries;
  entries.reserve(buffers.src_addrs.size());
  for (const IndexRange& range : destination_ranges(function, buffers, stage, compat)) {
    for (int64_t i = range.begin; i < range.end; ++i) entries.push_back(i);
  }
  if (!buffers.src_addrs.empty()) {
    at(entries, buffers.src_addrs.size() - 1, function, "destination entries");
  }
  entries.resize(buffers.src_addrs.size());  // a destination's draft tail
  return entries;
}

void check_items(
    const char* function,
    const SendBuffers& buffers,
    const SendItems& items,
    std::span<const int64_t> dst_entries,
    std::span<const uint64_t> dst_item_lens
) {
  if (items.src.empty() || items.dst.empty()) return;
  const int64_t last_src = last_item(function, "source", items.src);
  const int64_t last_dst = last_item(function, "destination", items.dst);
  for (std::size_t i = 0; i < dst_entries.size(); ++i) {
    if (dst_entries[i] < 0) continue;
    const uint64_t item_len = buffers.src_item_lens[i];
    check_end(function, "source", i, buffers.src_addrs[i], item_len, last_src);
    check(
        buffers.src_data_lens.empty() ||
            static_cast<uint64_t>(last_src) < buffers.src_data_lens[i] / item_len,
        function, ": source indices must be within the ",
        buffers.src_data_lens.empty() ? 0 : buffers.src_data_lens[i] / item_len, " items of entry ",
        i, ", got ", last_src
    );
    check_end(
        function, "destination", dst_entries[i], buffers.dst_addrs[dst_entries[i]],
        dst_item_lens[i], last_dst
    );
  }
}

const char* part_of(std::size_t i, std::size_t num_src, const SendStage& stage) {
  constexpr std::array kKinds = {"k", "v", "index_k"};
  constexpr std::array kDrafts = {"draft k", "draft v", "draft index_k"};
  const auto groups = static_cast<std::size_t>(stage.is_mla ? stage.kv.kv_buf_groups : 2);
  if (groups > kKinds.size() || num_src % groups != 0) return "kv";
  const std::size_t num_layers = num_src / groups;
  const auto drafts = static_cast<std::size_t>(stage.kv.draft_kv_layers);
  const bool has_drafts = drafts < num_layers && (stage.kv.is_last_rank || stage.pp_size == 1);
  const std::size_t targets = num_layers - (has_drafts ? drafts : 0);
  if (i < groups * targets) return kKinds[i / targets];
  return kDrafts[(i - groups * targets) / drafts];
}

}  // namespace cpattn
