// SPDX-License-Identifier: Apache-2.0
// The rules that say which buffers of two lists belong together, against lists of known layers.
#include "cpattn/transfer/kv_pointers.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <optional>
#include <tuple>
#include <vector>

#include "cpattn/transfer/kv_shards.h"
#include "cpattn/transfer/send_kvcache.h"
#include "fuzz/fuzz.h"

namespace cpattn::fuzz {
namespace {

using Ints = std::vector<int64_t>;
using Buffer = std::tuple<bool, int64_t, int64_t>;  // draft, group, layer

/// The buffers of a server as it lists them: groups of layers, then those of drafts.
std::vector<Buffer> buffers_of(int64_t groups, IndexRange layers, int64_t num_drafts) {
  std::vector<Buffer> buffers;
  for (const bool draft : {false, true}) {
    const IndexRange held = draft ? IndexRange{0, num_drafts} : layers;
    for (int64_t group = 0; group < groups; ++group) {
      for (int64_t i = held.begin; i < held.end; ++i) buffers.emplace_back(draft, group, i);
    }
  }
  return buffers;
}

void check_in_list(IndexRange range, int64_t size) {
  FUZZ_CHECK(range.begin >= 0 && range.begin <= range.end && range.end <= size);
}

/// A strict answer to a stage that tells the truth is right.
void check_true_stage(Reader& in) {
  const int64_t groups = in.between(1, 3);
  const int64_t total = in.between(1, 8);
  const int64_t first = in.between(0, total);
  const IndexRange layers = {first, in.between(first, total)};
  const int64_t model_drafts = in.between(0, 2);
  const bool is_last = layers.end == total;
  const int64_t drafts = is_last ? model_drafts : 0;
  const auto src = buffers_of(groups, layers, drafts);
  // The whole model, with its drafts or without them, or the same stage.
  const int64_t kind = in.between(0, 2);
  const auto dst = kind == 2 ? src : buffers_of(groups, {0, total}, kind == 0 ? model_drafts : 0);
  KVStage stage = {
      .prefill_start_layer = first,
      .kv_buf_groups = groups,
      .total_kv_layers = in.flag() ? total : 0,
      .hidden_kv_layers = std::nullopt,
      .draft_kv_layers = model_drafts,
      .is_last_rank = is_last,
  };
  if (in.flag()) stage.hidden_kv_layers = total;
  // Without hidden_kv_layers drafts of the source are unknown: the list of a stage with drafts
  // is then none that the arguments describe.
  if (drafts > 0 && !stage.hidden_kv_layers) return;
  const auto ranges =
      accepted([&] { return mla_kv_entries(std::ssize(src), std::ssize(dst), stage, false); });
  if (!ranges) return;
  std::vector<Buffer> received;
  for (const IndexRange& range : *ranges) {
    check_in_list(range, std::ssize(dst));
    received.insert(received.end(), dst.begin() + range.begin, dst.begin() + range.end);
  }
  FUZZ_CHECK(received == src);
  if (groups != 2 || drafts > 0) return;
  const auto entries = accepted([&] {
    return mha_kv_entries(
        std::ssize(src), std::ssize(dst), first, stage.total_kv_layers, /*compat=*/false
    );
  });
  if (!entries) return;
  for (int64_t i = 0; i < entries->num_layers; ++i) {
    FUZZ_CHECK(src.at(entries->src_k.begin + i) == dst.at(entries->dst_k.begin + i));
    FUZZ_CHECK(src.at(entries->src_v.begin + i) == dst.at(entries->dst_v.begin + i));
  }
}

/// Any numbers: ranges stay within the lists.
void check_any_stage(Reader& in) {
  const int64_t num_src = in.between(0, 12), num_dst = in.between(0, 12);
  KVStage stage = {
      .prefill_start_layer = in.mostly(in.between(0, 6), 4),
      .kv_buf_groups = in.mostly(in.between(1, 3), 8),
      .total_kv_layers = in.mostly(in.between(0, 6), 4),
      .hidden_kv_layers = std::nullopt,
      .draft_kv_layers = in.mostly(in.between(0, 2), 4),
      .is_last_rank = in.flag(),
  };
  if (in.flag()) stage.hidden_kv_layers = in.mostly(in.between(0, 6), 4);
  for (const bool compat : {false, true}) {
    const auto ranges = accepted([&] { return mla_kv_entries(num_src, num_dst, stage, compat); });
    int64_t size = 0;
    for (const IndexRange& range : ranges.value_or(std::vector<IndexRange>())) {
      if (compat) {
        FUZZ_CHECK(range.size() == 0 || (range.begin >= 0 && range.end <= num_dst));
      } else {
        check_in_list(range, num_dst);
      }
      size += range.size();
    }
    FUZZ_CHECK(!ranges || compat || size == num_src);
    const auto entries = accepted([&] {
      return mha_kv_entries(
          num_src, num_dst, stage.prefill_start_layer, stage.total_kv_layers, compat
      );
    });
    if (!entries) continue;
    FUZZ_CHECK(entries->src_v.end == num_src);
    if (compat) continue;
    check_in_list(entries->dst_k, num_dst);
    check_in_list(entries->dst_v, num_dst);
    FUZZ_CHECK(entries->dst_k.size() == entries->num_layers);
    FUZZ_CHECK(entries->dst_v.size() == entries->num_layers);
  }
}

void check_shards(Reader& in);

void check_pairs(Reader& in) {
  const auto id = [&] { return in.mostly(in.between(0, 5)); };
  const Ints src = in.list(in.between(0, 6), id), dst = in.list(in.between(0, 6), id);
  const int64_t num_src = in.mostly(std::ssize(src), 8), num_dst = in.mostly(std::ssize(dst), 8);
  if (num_src > 1000 && num_src <= 1 << 24) return;  // time for nothing new
  const bool fallback = in.flag();
  const auto pairs = accepted_but_for<std::runtime_error>([&] {
    return build_transfer_entry_pairs(src, dst, num_src, num_dst, fallback);
  });
  FUZZ_CHECK(!pairs || std::ssize(*pairs) == num_src);
  std::vector<int64_t> used;
  for (int64_t i = 0; pairs && i < num_src; ++i) {
    const auto [from, to] = (*pairs)[i];
    FUZZ_CHECK(from == i && to >= 0 && to < num_dst);
    if (!src.empty() && !dst.empty()) FUZZ_CHECK(src.at(i) == dst.at(to));
    used.push_back(to);
  }
  std::ranges::sort(used);
  FUZZ_CHECK(std::ranges::adjacent_find(used) == used.end());
  Ints ids = src;
  if (in.flag()) std::ranges::sort(ids);
  const int64_t layer = in.mostly(in.between(0, 6));
  const auto start = accepted([&] { return kv_start_layer(layer, ids); });
  if (start) FUZZ_CHECK(*start == std::ranges::count_if(ids, [&](auto v) { return v < layer; }));
  check_shards(in);
}

void check_targets(Reader& in) {
  const int64_t prefill = in.mostly(in.one_of({1, 2, 3, 4, 8, 12}), 8);
  const int64_t decode = in.mostly(in.one_of({1, 2, 3, 4, 8, 12}), 8);
  const int64_t rank = in.mostly(in.between(0, 12), 8);
  const bool is_mla = in.flag();
  const auto targets = accepted([&] { return decode_targets(rank, prefill, decode, is_mla); });
  if (!targets) return;
  check_in_list(targets->ranks, prefill);
  FUZZ_CHECK(targets->num_real >= 1 && targets->num_real <= targets->ranks.size());
  if (std::max(prefill, decode) > 64) return;
  // Ranks of prefill that wait for `required` processes get that many.
  std::map<int64_t, int64_t> count;
  for (int64_t r = 0; r < decode; ++r) {
    const DecodeTargets of = decode_targets(r, prefill, decode, is_mla);
    FUZZ_CHECK(of.required_dst_info_num == targets->required_dst_info_num);
    for (int64_t p = of.ranks.begin; p < of.ranks.end; ++p) ++count[p];
  }
  FUZZ_CHECK(std::ssize(count) == prefill);
  for (const auto& [_, n] : count) FUZZ_CHECK(n == targets->required_dst_info_num);
}

/// Ranks that stripe pages send each once; so do ranks that divide pages or layers.
void check_shards(Reader& in) {
  const int64_t size = in.mostly(in.between(1, 5)), rank = in.mostly(in.between(0, 4));
  const Ints pages = in.list(in.between(0, 8), [&] { return in.mostly(in.between(0, 40)); });
  const int64_t start = in.mostly(in.between(0, 9));
  const int64_t num_pages = in.size_near(std::ssize(pages));
  if (start > INT64_MAX - num_pages) return;
  const IndexRange chunk = {start, start + num_pages};
  if (const auto owned =
          accepted([&] { return filter_kv_indices_for_shard_rank(pages, chunk, rank, size); })) {
    FUZZ_CHECK(owned->pages.size() == owned->positions.size());
    for (std::size_t i = 0; i < owned->pages.size(); ++i) {
      FUZZ_CHECK(pages.at(owned->positions[i] - start) == owned->pages[i] * size + rank);
    }
    FUZZ_CHECK(std::ssize(owned->pages) == std::ranges::count_if(pages, [&](int64_t page) {
                 return page % size == rank;
               }));
  }
  const int64_t total = in.mostly(in.between(0, 20));
  const std::optional<int64_t> end = in.flag() ? std::optional(chunk.end) : std::nullopt;
  if (const auto share = accepted([&] {
        return filter_kv_indices_for_cp_rank(std::ssize(pages), start, end, total, rank, size);
      })) {
    check_in_list(*share, std::ssize(pages));
  }
  const auto layers = accepted([&] { return get_layer_shard_range(rank, size, total); });
  if (!layers || layers->size() == 0) return;
  check_in_list(*layers, total);
  FUZZ_CHECK(get_layer_owner(layers->begin, size, total) == rank);
  FUZZ_CHECK(get_layer_owner(layers->end - 1, size, total) == rank);
}

/// Heads of a rank, as slice_heads has them.
IndexRange heads_of(int64_t total, int64_t size, int64_t rank) {
  const int64_t count = std::max<int64_t>(1, total / size);
  const int64_t first = rank / std::max<int64_t>(1, size / total) * count;
  return {first, first + count};
}

void check_heads(Reader& in) {
  const int64_t total = in.mostly(in.one_of({1, 2, 4, 6, 8}));
  const int64_t src = in.mostly(in.one_of({1, 2, 4, 8})), dst = in.mostly(in.one_of({1, 2, 4, 8}));
  const int64_t src_rank = in.mostly(in.between(0, 7)), dst_rank = in.mostly(in.between(0, 7));
  accepted([&] { return slice_heads(total, src, src_rank, dst, dst_rank, true); });
  const auto slice =
      accepted([&] { return slice_heads(total, src, src_rank, dst, dst_rank, false); });
  if (!slice) return;
  const IndexRange from = heads_of(total, src, src_rank), to = heads_of(total, dst, dst_rank);
  FUZZ_CHECK(slice->src_heads == from.size() && slice->dst_heads == to.size());
  FUZZ_CHECK(slice->src_start >= 0 && slice->dst_start >= 0 && slice->num_heads >= 1);
  FUZZ_CHECK(slice->src_start + slice->num_heads <= slice->src_heads);
  FUZZ_CHECK(slice->dst_start + slice->num_heads <= slice->dst_heads);
  FUZZ_CHECK(from.begin + slice->src_start == to.begin + slice->dst_start);
}

}  // namespace

void run(Reader in) {
  constexpr void (*kChecks[])(Reader&) = {
      check_true_stage, check_any_stage, check_pairs, check_targets, check_heads
  };
  in.one_of(kChecks)(in);
}

}  // namespace cpattn::fuzz
