// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <stdexcept>
#include <unordered_map>

#include "cpattn/base/check.h"
#include "cpattn/transfer/kv_pointers.h"

namespace cpattn {
namespace {

constexpr int64_t kMaxEntries = 1 << 24;  // far above any model, far below any memory

/// Throws the error that engines catch by its text, so the text is theirs.
template <class... Parts>
void refuse_unless(bool ok, const Parts&... parts) {
  if (!ok) throw std::runtime_error(concat(parts...));
}

/// The indices at which each id occurs, the next one to be used last.
std::unordered_map<int64_t, std::vector<int64_t>> occurrences(std::span<const int64_t> ids) {
  std::unordered_map<int64_t, std::vector<int64_t>> indices;
  for (std::size_t i = ids.size(); i-- > 0;) indices[ids[i]].push_back(static_cast<int64_t>(i));
  return indices;
}

}  // namespace

std::vector<std::pair<int64_t, int64_t>> build_transfer_entry_pairs(
    std::span<const int64_t> src_layer_ids,
    std::span<const int64_t> dst_layer_ids,
    int64_t num_src,
    int64_t num_dst,
    bool allow_positional_fallback
) {
  check(
      num_src >= 0 && num_dst >= 0 && num_src <= kMaxEntries && num_dst <= kMaxEntries,
      "build_transfer_entry_pairs: n_src and n_dst must be in [0, ", kMaxEntries, "], got ",
      num_src, " and ", num_dst
  );
  std::vector<std::pair<int64_t, int64_t>> pairs;
  if (num_src == 0) return pairs;
  if (src_layer_ids.empty() || dst_layer_ids.empty()) {
    const bool both_absent = src_layer_ids.empty() && dst_layer_ids.empty();
    refuse_unless(
        both_absent || allow_positional_fallback,
        "Layer metadata must be provided by both PD peers or neither, got ", src_layer_ids.size(),
        " ids of the source and ", dst_layer_ids.size(), " of the destination"
    );
    refuse_unless(
        num_src == num_dst || (allow_positional_fallback && num_dst >= num_src),
        "PP-heterogeneous transfer requires layer ids on both peers; got src=", num_src,
        " dst=", num_dst, " entries"
    );
    for (int64_t i = 0; i < num_src; ++i) pairs.emplace_back(i, i);
    return pairs;
  }
  refuse_unless(
      std::ssize(src_layer_ids) == num_src && std::ssize(dst_layer_ids) == num_dst,
      "Layer metadata length must match transfer entries: src metadata=", src_layer_ids.size(),
      " entries=", num_src, ", dst metadata=", dst_layer_ids.size(), " entries=", num_dst
  );
  auto unused = occurrences(dst_layer_ids);
  for (int64_t i = 0; i < num_src; ++i) {
    const auto found = unused.find(src_layer_ids[i]);
    refuse_unless(
        found != unused.end() && !found->second.empty(),
        "Decode peer is missing a transfer entry for model layer ", src_layer_ids[i],
        ", which is source entry ", i
    );
    pairs.emplace_back(i, found->second.back());
    found->second.pop_back();
  }
  return pairs;
}

int64_t kv_start_layer(int64_t start_layer, std::span<const int64_t> kv_layer_ids) {
  check(start_layer >= 0, "kv_start_layer: start_layer must be >= 0, got ", start_layer);
  const auto descent = std::ranges::adjacent_find(kv_layer_ids, std::greater_equal{});
  check(
      descent == kv_layer_ids.end(), "kv_start_layer: kv_layer_ids must ascend, got no ascent at ",
      "index ", descent - kv_layer_ids.begin() + 1
  );
  return std::ranges::lower_bound(kv_layer_ids, start_layer) - kv_layer_ids.begin();
}

DecodeTargets decode_targets(
    int64_t engine_rank, int64_t prefill_tp_size, int64_t decode_tp_size, bool is_mla
) {
  check(
      prefill_tp_size >= 1 && decode_tp_size >= 1 &&
          (prefill_tp_size % decode_tp_size == 0 || decode_tp_size % prefill_tp_size == 0),
      "decode_targets: one of prefill_tp_size and decode_tp_size must divide the other, got ",
      prefill_tp_size, " and ", decode_tp_size
  );
  check(engine_rank >= 0, "decode_targets: engine_rank must be >= 0, got ", engine_rank);
  const int64_t rank = engine_rank % decode_tp_size;
  if (decode_tp_size >= prefill_tp_size) {
    const int64_t sharing = decode_tp_size / prefill_tp_size;
    const int64_t target = rank / sharing;
    return {.ranks = {target, target + 1}, .num_real = 1, .required_dst_info_num = sharing};
  }
  const int64_t senders = prefill_tp_size / decode_tp_size;
  return {
      .ranks = {rank * senders, (rank + 1) * senders},
      .num_real = is_mla ? 1 : senders,
      .required_dst_info_num = 1
  };
}

}  // namespace cpattn
