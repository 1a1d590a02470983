// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "cpattn/distributed/key_share.h"

namespace cpattn {

/// Part of the keys of a batch.
struct KeyPart {
  bool cached = false;        // cached keys, read from the pools
  bool new_in_pools = false;  // new ones, from the pools
  bool new_rows = false;  // new ones, which are in no pool yet, from the ranks that compute them
};

/// The keys that all ranks send, and the pages of scratch that hold the keys of each request in
/// order. A rank sends rows of its pool first, then rows that are in no pool.
struct KeyScratch {
  PaddedTable block_tables;  // of scratch
  int64_t num_slots = 0;
  std::vector<std::vector<int64_t>> sent_rows;  // of each rank, in its pool
  std::vector<int64_t> slots;     // of the rows of all ranks, rank after rank; -1 for padding
  std::vector<int64_t> new_rows;  // which of these are in no pool
};

/// Plans scratch for a part of the keys, without keys that no query sees: their position is more
/// than `window` before the first query's. `rows` has the new tokens of all ranks, rank after rank.
KeyScratch plan_key_scratch(
    const std::shared_ptr<const BatchKeys>& keys,
    const NewTokens& tokens,
    const TokenRows& rows,
    std::span<const int64_t> rows_per_rank,
    const KeyPart& part,
    std::optional<int64_t> window
);

}  // namespace cpattn
