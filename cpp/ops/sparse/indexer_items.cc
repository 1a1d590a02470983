// SPDX-License-Identifier: Apache-2.0
#include "ops/sparse/indexer_items.h"

#include <algorithm>
#include <tuple>

namespace cpattn {
namespace {

/// Queries that share packed keys. Packing takes as long as the scores of a sixth of a
/// query of 64 heads.
constexpr int64_t kItemQueries = 32;
constexpr int64_t kFewerQueries = 16;
/// Items of one thread: enough that it spends little of its time waiting for others.
constexpr int64_t kThreadItems = 8;
/// The fewest keys of a part: merging its selection then costs 2 % of its scores.
constexpr int64_t kPartKeys = 8192;
/// A part that selects most of its keys would only cost memory.
constexpr int64_t kPartKeysPerSelected = 4;
/// The most keys that the queries of an item select: each takes 24 bytes of buffers.
constexpr int64_t kItemSelected = int64_t{1} << 17;

std::vector<IndexerItem> group_rows(std::span<const IndexerRow> rows, int64_t most) {
  std::vector<IndexerItem> groups;
  for (int64_t i = 0; i < std::ssize(rows); ++i) {
    if (groups.empty() || groups.back().count == most ||
        rows[groups.back().begin].table_row != rows[i].table_row) {
      groups.push_back({.begin = i});
    }
    ++groups.back().count;
  }
  return groups;
}

int64_t cost_of(std::span<const IndexerRow> rows, const IndexerItem& item) {
  int64_t cost = 0;
  for (const IndexerRow& row : rows.subspan(item.begin, item.count)) {
    const int64_t begin = std::max(row.begin, item.first_key);
    cost += std::max<int64_t>(0, std::min(row.end, item.end_key) - begin);
  }
  return cost;
}

/// The keys between the first and the last that any row of the item sees.
void find_keys(std::span<const IndexerRow> rows, IndexerItem& item) {
  item.first_key = INT64_MAX;
  item.end_key = 0;
  for (const IndexerRow& row : rows.subspan(item.begin, item.count)) {
    if (row.begin >= row.end) continue;
    item.first_key = std::min(item.first_key, row.begin);
    item.end_key = std::max(item.end_key, row.end);
  }
  item.first_key = std::min(item.first_key, item.end_key);
}

}  // namespace

IndexerItems make_indexer_items(std::span<const IndexerRow> rows, int num_threads, int64_t topk) {
  const int64_t wanted = num_threads > 1 ? num_threads * kThreadItems : 1;
  const bool few = std::ssize(rows) < wanted * kItemQueries;
  const int64_t item_queries = few && wanted > 1 ? kFewerQueries : kItemQueries;
  const int64_t most_queries = std::max<int64_t>(1, kItemSelected / std::max<int64_t>(1, topk));
  const std::vector<IndexerItem> groups = group_rows(rows, std::min(item_queries, most_queries));
  const int64_t part_keys = std::max(kPartKeys, kPartKeysPerSelected * topk);
  IndexerItems result;
  for (IndexerItem item : groups) {
    find_keys(rows, item);
    const int64_t first = item.first_key, num_keys = item.end_key - item.first_key;
    const int64_t most = std::max<int64_t>(1, num_keys / part_keys);
    item.num_parts = std::min(most, (wanted + std::ssize(groups) - 1) / std::ssize(groups));
    item.first_slot = result.num_slots;
    if (item.num_parts > 1) result.num_slots += item.count * item.num_parts;
    for (; item.part < item.num_parts; ++item.part) {
      item.first_key = first + num_keys * item.part / item.num_parts;
      item.end_key = first + num_keys * (item.part + 1) / item.num_parts;
      item.cost = cost_of(rows, item);
      result.items.push_back(item);
    }
  }
  const auto order = [](const IndexerItem& item) {
    return std::tuple(-item.cost, item.begin, item.part);
  };
  std::sort(
      result.items.begin(), result.items.end(),
      [&](const IndexerItem& a, const IndexerItem& b) { return order(a) < order(b); }
  );
  return result;
}

}  // namespace cpattn
