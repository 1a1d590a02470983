// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "cpattn/base/index_table.h"
#include "cpattn/kv/placement.h"

namespace cpattn {

/// The pages of plans are numbered in int32, and each plan has a number for every page.
constexpr int64_t kMaxGatherPages = int64_t{1} << 28;

/// Memory that all ranks lay out alike: the striped pool, and the scratch from which attention
/// reads one layer, [prefix | chunk | one trash page].
struct ShardScratch {
  Interleave placement;           // run_len is the page size
  int64_t size = 0;               // slots of each rank, without those of its reserved page
  int64_t max_prefix_tokens = 0;  // of the scratch: whole pages, as many for each rank
  int64_t chunk_tokens = 0;       // of the scratch: whole pages

  int64_t page_size() const { return placement.run_len; }
  /// Pages of the pool, with the reserved ones of all ranks.
  int64_t num_pages() const { return placement.shard_size * (size / page_size() + 1); }
  int64_t chunk_page() const { return max_prefix_tokens / page_size(); }
  int64_t trash_page() const { return chunk_page() + chunk_tokens / page_size(); }

  bool operator==(const ShardScratch&) const = default;
};

/// The slots of a batch: request i has those in req_to_token[req_pool_indices[i]], cached ones
/// below prefix_lens[i], new ones below seq_lens[i]. Plans read the first slot of each page.
struct ShardBatch {
  using Lens = std::span<const int64_t>;

  IndexTable req_to_token;               // [requests, tokens] slots
  std::optional<Lens> req_pool_indices;  // [bs] rows of req_to_token; default 0, 1, ...
  Lens prefix_lens;                      // [bs] multiples of the page size
  Lens seq_lens;                         // [bs] cached prefix + new tokens
};

/// The places of the keys and values of a batch in the scratch, equal on every rank. Each rank
/// sends `block_pages` of its pages; the sent pages, rank after rank, are the prefix. A value:
/// plans of the same scratch and pages are equal.
struct ShardGatherPlan {
  using Ints = std::vector<int32_t>;

  ShardScratch scratch;
  int64_t block_pages = 0;  // that each rank sends; 0: nothing is gathered
  Ints prefix_pages;        // pages of the pool that are gathered, by rank, ascending on each
  Ints chunk_pages;         // pages of new tokens, in the order of batch and positions
  Ints send_pages;          // [shard_size, block_pages] local pages, padded with 0
  Ints page_pos;            // [num_pages] page of the scratch; the trash page where there is none

  bool operator==(const ShardGatherPlan& other) const {
    return scratch == other.scratch && block_pages == other.block_pages &&
           prefix_pages == other.prefix_pages && chunk_pages == other.chunk_pages;
  }
};

/// Plans the gather of a batch. A page that several prefixes share is gathered once. Throws
/// std::invalid_argument for sizes that contradict each other, prefixes that are no whole pages or
/// whose pages do not lie on the ranks in turn, slots that do not begin a page of the pool after
/// the reserved ones, a new page that occurs twice, and more pages than the scratch has.
ShardGatherPlan plan_shard_gather(const ShardScratch& scratch, const ShardBatch& batch);

/// Restores a plan from these of its fields. Throws std::invalid_argument if no plan has them.
ShardGatherPlan restore_shard_gather(
    const ShardScratch& scratch,
    int64_t block_pages,
    std::span<const int64_t> prefix_pages,
    std::span<const int64_t> chunk_pages
);

/// The row of the scratch of each slot of the pool; -1 stays -1. Slots of pages that are not in the
/// plan have rows of the trash page. Throws std::invalid_argument for slots outside the pool.
void translate_slots(
    const ShardGatherPlan& plan, std::span<const int64_t> slots, std::span<int64_t> rows
);

/// Returns the entries of `slots`, which a batch writes, that `rank` holds, with their rows in its
/// pool; padding with slot 0 is row 0 of rank 0. Throws std::invalid_argument for slots outside the
/// pool.
LocalShare plan_shard_write(
    const ShardGatherPlan& plan, std::span<const int64_t> slots, int64_t rank
);

}  // namespace cpattn
