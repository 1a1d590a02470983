// SPDX-License-Identifier: Apache-2.0
#include "cpattn/kv/units.h"

#include <algorithm>
#include <numeric>

#include "cpattn/base/check.h"
#include "cpattn/base/page_size.h"
#include "meta/context_parallel/relayout_writer.h"
#include "meta/kv/run_cursor.h"

namespace cpattn {
namespace {

using Sharing = UnitPools::Sharing;

void check_pools(const UnitPools& pools, const RankRows& rows, const char* function) {
  check_page_size(function, pools.page_size);
  const auto sequences = static_cast<int64_t>(rows.prefix_lens.size());
  check(
      pools.block_tables.rows == sequences, function,
      ": block_tables must have one row per sequence (", sequences, "), got ",
      pools.block_tables.rows
  );
  if (pools.sharing == Sharing::nothing) return;
  check(
      pools.placement.shard_size == rows.cp_size(), function,
      ": shard_size of placement must be the number of ranks, ", rows.cp_size(), ", got ",
      pools.placement.shard_size
  );
  check(
      pools.sharing != Sharing::slots || pools.placement.run_len == pools.page_size, function,
      ": page_size of placement must be page_size, ", pools.page_size, ", got ",
      pools.placement.run_len
  );
}

/// The slot of the n-th unit in the table of a request.
int64_t slot_of(const UnitPools& pools, int64_t request, int64_t n, const char* function) {
  const int64_t column = n / pools.page_size;
  check(
      column < pools.block_tables.columns, function, ": block_tables must have at least ",
      column + 1, " columns for sequence ", request, ", got ", pools.block_tables.columns
  );
  const int64_t page = pools.block_tables.at(request, column);
  check(
      page >= 0 && page <= INT32_MAX, function, ": page ids must be in [0, 2^31), got ", page,
      " at position ", column, " of sequence ", request
  );
  return page * pools.page_size + n % pools.page_size;
}

}  // namespace

RelayoutPlan plan_units(
    const RankRows& rows, int64_t rank, int64_t ratio, const UnitPools& pools, const char* function
) {
  check_unit(function, ratio, ratio);
  check_pools(pools, rows, function);
  const bool of_slots = pools.sharing == Sharing::slots;
  const bool of_units = pools.sharing == Sharing::units;
  // Owners and pages change at its multiples.
  const int64_t grain =
      of_units ? std::gcd(pools.page_size, pools.placement.run_len) : pools.page_size;
  const RankRows parts = consecutive(rows);
  const std::vector<uint8_t> everywhere = parts.whole_on_each_rank();
  RunCursor place(pools.placement);
  RelayoutWriter writer(rows.cp_size());
  int64_t row = 0;  // of the units of this rank
  for (int64_t i = 0; i < parts.num_segments(); ++i) {
    const int64_t request = parts.request[i], from = parts.rank[i];
    if (everywhere[request] != 0 && from != rank) continue;
    const int64_t end = (parts.position[i] + parts.count[i]) / ratio;
    for (int64_t unit = parts.position[i] / ratio, count = 0; unit < end; unit += count) {
      count = std::min(grain - unit % grain, end - unit);
      int64_t owner = rank, kept = unit;  // on its owner
      if (of_slots) kept = slot_of(pools, request, unit, function);
      if (of_slots || of_units) {
        place.seek(kept);
        owner = place.owner();
        kept = place.local(kept);
      }
      if (owner == rank) {
        const int64_t slot = of_slots ? kept : slot_of(pools, request, kept, function);
        writer.receive(from, slot, count);
      }
      if (from != rank) continue;
      for (int64_t to = 0; to < rows.cp_size(); ++to) {
        const bool keeps = pools.sharing == Sharing::nothing || to == owner;
        if (keeps && (everywhere[request] == 0 || to == rank)) writer.send(to, row, count);
      }
      row += count;
    }
  }
  return writer.plan();
}

}  // namespace cpattn
