// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "cpattn/distributed/batch_pages.h"
#include "cpattn/kv/placement.h"

namespace cpattn {

/// Places of the slots of some pages: the rank of each slot, and its row in that rank's pool.
struct PlacedSlots {
  std::span<const int64_t> pages;   // ascending
  std::span<const int64_t> owners;  // [pages, page_size]
  std::span<const int64_t> rows;    // the same, >= 0
};

/// The keys of a batch, with the rank and the row in its pool of each key. A value.
///
/// Keys lie in runs: consecutive positions in consecutive rows of one rank. `run_len` divides
/// page_size, and runs begin at multiples of it, as positions and as rows.
class BatchKeys {
 public:
  /// An interleave distributes slots over ranks; it is computed, never stored.
  BatchKeys(std::shared_ptr<const BatchPages> pages, const Interleave& interleave);
  /// `placed`, which must have every page of the batch, has the places of slots. The constructor
  /// finds its longest runs and stores them.
  BatchKeys(std::shared_ptr<const BatchPages> pages, int64_t num_ranks, const PlacedSlots& placed);

  const BatchPages& pages() const { return *pages_; }
  int64_t num_ranks() const { return interleave_.shard_size; }
  int64_t run_len() const { return run_len_; }

 private:
  friend class KeyShare;

  /// Rows of a rank's pool below that of a slot: with an interleave, rows count the rank's slots.
  int64_t rows_below(int64_t rank, int64_t slot) const;

  std::shared_ptr<const BatchPages> pages_;
  Interleave interleave_;
  int64_t run_len_ = 1;
  std::vector<int64_t> owners_, rows_;  // of each run of each page; empty for an interleave
};

/// A list of keys, request after request, in ascending positions.
struct LocalKeys {
  std::vector<int64_t> request, position, row;
};

/// Pages of a pool that hold a share of keys, as attention reads them; request i has ids from
/// indptr[i] on.
struct LocalPages {
  int64_t page_size = 1;
  std::vector<int64_t> indptr;  // [bs + 1]
  std::vector<int64_t> ids;
};

/// The keys of a batch that some of the ranks hold. The constructor prepares counts in O(1).
class KeyShare {
 public:
  /// Throws std::invalid_argument unless ranks are ascending and each in [0, num_ranks).
  KeyShare(std::shared_ptr<const BatchKeys> keys, std::vector<int64_t> ranks);

  const BatchKeys& keys() const { return *keys_; }

  /// Counts the keys of a request that the share has before `position`, at most its length.
  int64_t count_below(int64_t request, int64_t position) const;
  /// Counts the keys of a request that the share has.
  int64_t count(int64_t request) const {
    return count_below(request, keys_->pages().kv_lens[request]);
  }

  /// All keys of the share. Rows are those of their own rank's pool.
  LocalKeys local_keys() const;
  /// Pages as large as the runs allow, or larger by a power of two, up to 64 rows, where runs
  /// follow each other. For a share of one rank only.
  LocalPages local_pages() const;
  /// The row of the key at a position of a request; -1 if the share lacks it. For a share of one
  /// rank only.
  int64_t row_of(int64_t request, int64_t position) const;

 private:
  bool has(int64_t rank) const { return is_member_[rank] != 0; }
  int64_t owner_of(int64_t unit) const;
  int64_t unit_count(int64_t unit, int64_t length) const;
  int64_t units_before(int64_t unit) const {
    return uniform_ > 0 ? unit * uniform_ : before_[unit];
  }
  template <class Visit>
  void for_each_run(int64_t request, Visit visit) const;
  template <class Visit>
  void for_each_block(int64_t request, Visit visit) const;
  bool divides(int64_t page_size) const;
  bool fits(int64_t page_size) const;

  std::shared_ptr<const BatchKeys> keys_;
  std::vector<int64_t> ranks_;
  std::vector<uint8_t> is_member_;  // by rank
  // Keys are counted in units: pages of an interleave, runs of placed slots.
  int64_t unit_len_ = 1;
  int64_t uniform_ = 0;          // keys of the share in each unit, if all have as many; or 0
  std::vector<int64_t> before_;  // [units + 1] keys of the share before each; empty if uniform
};

}  // namespace cpattn
