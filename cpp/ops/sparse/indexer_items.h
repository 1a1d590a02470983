// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "cpattn/sparse/indexer.h"

namespace cpattn {

/// A unit of work: rows [begin, begin + count), which read the same sequence, and their keys in
/// [first_key, end_key).
struct IndexerItem {
  int64_t begin = 0;
  int64_t count = 0;
  int64_t first_key = 0;
  int64_t end_key = INT64_MAX;
  int64_t cost = 0;  // scores
  /// An item for some of the keys is one of num_parts parts. Their selections for row begin + i are
  /// in slots from first_slot + i * num_parts on, one slot for each part in order.
  int64_t part = 0;
  int64_t num_parts = 1;
  int64_t first_slot = 0;

  int64_t slot(int64_t i) const { return first_slot + i * num_parts + part; }
};

/// All items, most expensive first, so that threads end at the same time. The division of
/// work depends on their number; scores and selections do not depend on the division.
struct IndexerItems {
  std::vector<IndexerItem> items;
  int64_t num_slots = 0;
};

/// `topk` is how many keys of each row are selected, 0 for none. Items and parts keep their
/// selections in bounded memory: a larger topk makes fewer of both.
IndexerItems make_indexer_items(
    std::span<const IndexerRow> rows, int num_threads, int64_t topk = 0
);

}  // namespace cpattn
