// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "cpattn/transfer/index_range.h"

namespace cpattn {

// The part of the KV cache that one of several prefill ranks sends: every N-th page of a group that
// stripes pages, a share of the pages of a group whose ranks hold all, or a share of the layers.

/// Pages of a rank, and the place of each in the list of pages that decode announced.
struct KVShardPages {
  std::vector<int32_t> pages;      // of the rank's own pool
  std::vector<int64_t> positions;  // within the transfer, as many
};

/// Selects the pages of a chunk that rank `shard_rank` holds, in the order given: logical page l
/// lives on rank l % shard_size as its page l / shard_size. The chunk is [begin, end) of the
/// transfer's pages, and kv_indices has as many entries.
KVShardPages filter_kv_indices_for_shard_rank(
    std::span<const int64_t> kv_indices,
    IndexRange index_slice,
    int64_t shard_rank,
    int64_t shard_size
);

/// Returns the part of a chunk's num_pages pages that rank `cp_rank` sends, of a group whose ranks
/// hold all pages and divide the transfer's total_pages like layers: [begin, end) of the chunk's
/// own list, {0, 0} for none. The chunk begins at page `start` of the transfer and ends at `end`,
/// or without one where the transfer does; no rank sends later pages.
IndexRange filter_kv_indices_for_cp_rank(
    int64_t num_pages,
    int64_t start,
    std::optional<int64_t> end,
    int64_t total_pages,
    int64_t cp_rank,
    int64_t cp_size
);

/// The layers of rank `rank` where shard_size ranks divide total_layers in order: equally many,
/// and one more for each of the first total_layers % shard_size ranks. The range may be empty.
IndexRange get_layer_shard_range(int64_t rank, int64_t shard_size, int64_t total_layers);

/// The rank whose get_layer_shard_range has the layer; the model's layers only.
int64_t get_layer_owner(int64_t local_layer_idx, int64_t shard_size, int64_t total_layers);

}  // namespace cpattn
