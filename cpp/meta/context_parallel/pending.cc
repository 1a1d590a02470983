// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "cpattn/base/check.h"
#include "cpattn/context_parallel/halo.h"
#include "meta/context_parallel/relayout_writer.h"

namespace cpattn {
namespace {

using Keepers = std::span<const int64_t>;

void check_keepers(const char* function, Keepers keepers, const RankRows& rows) {
  check(
      keepers.size() == rows.prefix_lens.size(), function,
      ": keepers must have one rank per sequence (", rows.prefix_lens.size(), "), got ",
      keepers.size()
  );
  for (std::size_t i = 0; i < keepers.size(); ++i) {
    check(
        keepers[i] >= -1 && keepers[i] < rows.cp_size(), function, ": keepers must be in [-1, ",
        rows.cp_size(), "), got ", keepers[i], " at index ", i
    );
  }
}

/// The tokens of each request, cached ones counted.
RankRows::Ints seq_lens_of(const RankRows& rows) {
  RankRows::Ints lens = rows.prefix_lens;
  for (int64_t i = 0; i < rows.num_segments(); ++i) {
    int64_t& len = lens[rows.request[i]];
    len = std::max(len, rows.position[i] + rows.count[i]);
  }
  return lens;
}

}  // namespace

RelayoutPlan plan_pending(
    const RankRows& rows,
    int64_t rank,
    int64_t window,
    int64_t ratio,
    std::optional<Keepers> keepers,
    const char* function
) {
  check_unit(function, window, ratio);
  if (keepers) check_keepers(function, *keepers, rows);
  const RankRows parts = consecutive(rows);
  const std::vector<uint8_t> everywhere = parts.whole_on_each_rank();
  const RankRows::Ints seq_lens = seq_lens_of(parts);
  RelayoutWriter writer(rows.cp_size());
  for (int64_t i = 0; i < parts.num_segments(); ++i) {
    const int64_t request = parts.request[i], from = parts.rank[i];
    const int64_t next_unit_end = (seq_lens[request] / ratio + 1) * ratio;
    const int64_t begin = std::max(parts.position[i], next_unit_end - window);
    const int64_t end = parts.position[i] + parts.count[i];
    const int64_t keeper = keepers ? (*keepers)[request] : -1;
    if (begin >= end) continue;
    for (int64_t to = 0; to < rows.cp_size(); ++to) {
      if ((keeper >= 0 && to != keeper) || (everywhere[request] != 0 && to != from)) continue;
      if (from == rank) writer.send(to, parts.row[i] + begin - parts.position[i], end - begin);
      if (to != rank) continue;
      for (int64_t p = begin; p < end; ++p) writer.receive(from, request * window + p % window, 1);
    }
  }
  return writer.plan();
}

}  // namespace cpattn
