// SPDX-License-Identifier: Apache-2.0
#include "cpattn/transfer/kv_pointers.h"

#include <algorithm>
#include <sstream>

#include "cpattn/base/check.h"

namespace cpattn {
namespace {

/// Far above any pool, which has three. The rules of engines give a range for each, empty or not.
constexpr int64_t kMaxGroups = 1 << 16;

/// Two lists of buffers whose layers are matched, and the names for errors.
struct Match {
  const char* function = "";
  int64_t num_src = 0;
  int64_t num_dst = 0;
  int64_t groups = 1;
  int64_t first_layer = 0;
  int64_t num_drafts = 0;  // of the source's layers

  int64_t src_layers() const { return num_src / groups; }
  int64_t dst_layers() const { return num_dst / groups; }
  int64_t num_targets() const { return src_layers() - num_drafts; }
  int64_t end_layer() const { return first_layer + num_targets(); }
};

std::ostream& operator<<(std::ostream& out, const Match& match) {
  return out << "source layers [" << match.first_layer << ", " << match.end_layer() << ") and "
             << match.num_drafts << " drafts in " << match.num_src << " entries, destination "
             << match.num_dst << " entries, each of " << match.groups << " group(s)";
}

/// Bounds layers and groups, so that their sums and products cannot overflow.
void check_stage(const char* function, const KVStage& stage) {
  check(
      stage.kv_buf_groups >= 1, function, ": kv_buf_groups must be >= 1, got ", stage.kv_buf_groups
  );
  check(
      stage.kv_buf_groups <= kMaxGroups, function, ": kv_buf_groups must be at most ", kMaxGroups,
      ", got ", stage.kv_buf_groups
  );
  const auto narrow = [function](int64_t value, const char* name) {
    narrow_to_int32(value, concat(function, ": ", name).c_str());
  };
  narrow(stage.prefill_start_layer, "prefill_start_layer");
  narrow(stage.total_kv_layers, "total_kv_layers");
  narrow(stage.hidden_kv_layers.value_or(0), "hidden_kv_layers");
  narrow(stage.draft_kv_layers, "draft_kv_layers");
  narrow(stage.num_draft_entries.value_or(0), "num_draft_entries");
  check(
      !stage.num_draft_entries || stage.kv_buf_groups == 1, function,
      ": kv_buf_groups must be 1 with num_draft_entries, got ", stage.kv_buf_groups
  );
}

void check_lists(const Match& match) {
  const auto& [function, num_src, num_dst, groups, first_layer, num_drafts] = match;
  check(
      num_src % groups == 0, function, ": source must have equally many entries in each of ",
      groups, " groups, got ", num_src
  );
  check(
      num_dst % groups == 0, function, ": destination must have equally many entries in each of ",
      groups, " groups, got ", num_dst
  );
  check(first_layer >= 0, function, ": prefill_start_layer must be >= 0, got ", first_layer);
  check(
      num_drafts >= 0 && num_drafts <= match.src_layers(), function,
      ": draft_kv_layers must be between 0 and the source's ", match.src_layers(),
      " layers per group, got ", num_drafts
  );
}

/// Matches entries by the strict rule, the same for every layout. total_layers counts the target
/// layers of the model, 0 for unknown.
std::vector<IndexRange> match_entries(const Match& match, int64_t total_layers) {
  check_lists(match);
  const int64_t held = match.dst_layers();
  check(
      total_layers >= 0, match.function, ": the number of layers must be >= 0, got ", total_layers
  );
  if (match.num_src == 0) return {};
  check(
      match.num_drafts == 0 || total_layers == 0 || match.end_layer() == total_layers,
      match.function, ": the stage with drafts must end at layer ", total_layers, "; ", match
  );
  // The two sides hold the whole model or, if the destination is too small for that, the same
  // stage.
  if (match.src_layers() == held && (match.first_layer == 0 || held < total_layers)) {
    return {{0, match.num_src}};
  }
  check(
      total_layers > 0, match.function,
      ": the model's number of target layers must be given, else drafts of the destination look "
      "like layers; ",
      match
  );
  check(
      held >= total_layers, match.function, ": destination holds ", held, " of ", total_layers,
      " layers per group, and not those of the source; ", match
  );
  check(
      match.end_layer() <= total_layers, match.function, ": source must end within the ",
      total_layers, " target layers of every group of the destination; ", match
  );
  check(
      match.num_drafts == 0 || held - total_layers == match.num_drafts, match.function,
      ": destination must hold as many drafts as the source, got ", held - total_layers, "; ", match
  );
  std::vector<IndexRange> ranges;
  ranges.reserve(match.groups + 1);
  for (int64_t g = 0; g < match.groups; ++g) {
    ranges.push_back({g * total_layers + match.first_layer, g * total_layers + match.end_layer()});
  }
  const int64_t tail = match.groups * total_layers;
  if (match.num_drafts > 0) ranges.push_back({tail, tail + match.groups * match.num_drafts});
  return ranges;
}

/// The range of list[begin:end] for a Python list of `size`.
IndexRange slice(int64_t begin, int64_t end, int64_t size) {
  const auto clip = [size](int64_t i) {
    return std::clamp<int64_t>(i < 0 ? i + size : i, 0, size);
  };
  return {clip(begin), clip(end)};
}

MhaEntries mha_as_engines_do(int64_t num_src, int64_t num_dst, int64_t first) {
  const int64_t n = num_src / 2;
  const int64_t held = num_dst / 2;
  MhaEntries entries{.src_k = {0, n}, .src_v = {n, num_src}, .dst_k = {}, .dst_v = {}};
  entries.num_layers = n;
  if (n == held) {
    entries.dst_k = {0, held};
    entries.dst_v = {held, num_dst};
    return entries;
  }
  check(
      n > 0, "get_mha_kv_ptrs_with_pp: source must have an entry of K and one of V at least, got ",
      num_src, " in all"
  );
  entries.dst_k = slice(first, first + n, num_dst);
  const int64_t offset = n < held && held % n != 0 ? n * (held / n) : held;
  entries.dst_v = slice(offset + first, offset + first + n, num_dst);
  return entries;
}

std::vector<IndexRange> mla_as_engines_do(int64_t num_src, int64_t num_dst, const KVStage& stage) {
  const int64_t groups = stage.kv_buf_groups;
  const int64_t first = stage.prefill_start_layer;
  const bool knows_drafts = stage.hidden_kv_layers.has_value();
  const int64_t held = num_dst / groups;
  const int64_t cap = stage.total_kv_layers != 0 ? std::min(held, stage.total_kv_layers) : held;
  const int64_t num_src_layers = num_src / groups;
  if (num_src_layers == (knows_drafts ? held : cap)) return {{0, num_dst}};

  const int64_t drafts = knows_drafts && stage.is_last_rank ? stage.draft_kv_layers : 0;
  const int64_t stride = stage.hidden_kv_layers.value_or(cap);
  const int64_t targets = num_src_layers - std::max<int64_t>(drafts, 0);
  std::vector<IndexRange> ranges;
  ranges.reserve(2 * groups);
  for (int64_t g = 0; g < groups; ++g) {
    ranges.push_back(slice(g * stride + first, g * stride + first + targets, num_dst));
  }
  for (int64_t g = 0; drafts > 0 && g < groups; ++g) {
    const int64_t tail = groups * stride;
    ranges.push_back(slice(tail + g * drafts, tail + (g + 1) * drafts, num_dst));
  }
  return ranges;
}

std::vector<IndexRange> flat_as_engines_do(int64_t num_src, int64_t num_dst, const KVStage& stage) {
  if (num_src == num_dst) return {{0, num_dst}};
  const int64_t drafts = *stage.num_draft_entries;
  const int64_t first = stage.prefill_start_layer;
  const IndexRange targets = slice(first, first + num_src - drafts, num_dst);
  if (drafts == 0) return {targets};
  return {targets, slice(-drafts, num_dst, num_dst)};
}

/// The strict rule of lists of one group. A stage that has drafts is the last, so that the model
/// ends with it.
std::vector<IndexRange> match_flat_entries(
    const char* function, int64_t num_src, int64_t num_dst, const KVStage& stage
) {
  const int64_t drafts = *stage.num_draft_entries;
  const int64_t total = stage.hidden_kv_layers.value_or(stage.total_kv_layers);
  check(
      drafts >= 0 && drafts <= num_src, function, ": num_draft_entries must be between 0 and the ",
      num_src, " entries of the source, got ", drafts
  );
  const int64_t end = stage.prefill_start_layer + num_src - drafts;
  return match_entries(
      {.function = function,
       .num_src = num_src,
       .num_dst = num_dst,
       .groups = 1,
       .first_layer = stage.prefill_start_layer,
       .num_drafts = drafts},
      total == 0 && drafts > 0 ? end : total
  );
}

}  // namespace

std::vector<IndexRange> match_kv_entries(
    const char* function, int64_t num_src, int64_t num_dst, const KVStage& stage
) {
  check_stage(function, stage);
  if (stage.num_draft_entries) return match_flat_entries(function, num_src, num_dst, stage);
  const bool knows_drafts = stage.hidden_kv_layers.has_value();
  return match_entries(
      {.function = function,
       .num_src = num_src,
       .num_dst = num_dst,
       .groups = stage.kv_buf_groups,
       .first_layer = stage.prefill_start_layer,
       .num_drafts = knows_drafts && stage.is_last_rank ? stage.draft_kv_layers : 0},
      stage.hidden_kv_layers.value_or(stage.total_kv_layers)
  );
}

MhaEntries mha_kv_entries(
    int64_t num_src,
    int64_t num_dst,
    int64_t prefill_start_layer,
    int64_t total_kv_layers,
    bool compat
) {
  constexpr char kFunction[] = "get_mha_kv_ptrs_with_pp";
  const KVStage stage{
      .prefill_start_layer = prefill_start_layer,
      .kv_buf_groups = 2,
      .total_kv_layers = total_kv_layers
  };
  check_stage(kFunction, stage);
  if (compat) return mha_as_engines_do(num_src, num_dst, prefill_start_layer);
  const auto ranges = match_kv_entries(kFunction, num_src, num_dst, stage);
  const int64_t n = num_src / 2;
  const int64_t k = ranges.empty() ? 0 : ranges.front().begin;
  const int64_t v = ranges.size() == 2 ? ranges[1].begin : n;
  return {
      .src_k = {0, n},
      .src_v = {n, num_src},
      .dst_k = {k, k + n},
      .dst_v = {v, v + n},
      .num_layers = n
  };
}

std::vector<IndexRange> mla_kv_entries(
    int64_t num_src, int64_t num_dst, const KVStage& stage, bool compat
) {
  if (!compat) return match_kv_entries("get_mla_kv_ptrs_with_pp", num_src, num_dst, stage);
  check_stage("get_mla_kv_ptrs_with_pp", stage);
  if (stage.num_draft_entries) return flat_as_engines_do(num_src, num_dst, stage);
  return mla_as_engines_do(num_src, num_dst, stage);
}

}  // namespace cpattn
