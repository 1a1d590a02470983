// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "cpattn/transfer/kv_layout.h"
#include "cpattn/transfer/transfer_plan.h"

namespace cpattn {

/// The most steps of a walk over the tokens of a sequence. A peer's layout could ask for more,
/// which would take hours and tens of gigabytes.
constexpr int64_t kMaxSteps = int64_t{1} << 24;

/// Appends a run, or extends the last one if both sides continue it.
void append_run(std::vector<TransferRun>& runs, TransferRun run);

/// Sorts runs by destination, and returns whether they were in another order.
bool sort_by_destination(std::vector<TransferRun>& runs);

/// Pages in which one side keeps the tokens of a sequence. Counts may be in pages instead of
/// tokens; page_size is then 1.
struct KVPageList {
  const char* function = "plan_kv_transfer";  // for messages, as is the side
  const char* side = "";
  std::span<const int64_t> pages;
  int64_t page_size = 1;
  int64_t start = 0;                  // the token of row 0 of the first page
  const KVEntry* smallest = nullptr;  // the buffer with the fewest pages
  int64_t dcp_rank = 0;               // `start` begins a cycle of this group
  int64_t dcp_size = 1;
  int64_t dcp_interleave = 1;
  int64_t shard_rank = 0;  // `pages` are those of this group
  int64_t shard_size = 1;

  /// The number of tokens below `token` that this side holds: the position of `token` if it is
  /// held.
  int64_t owned_below(int64_t token) const;
  /// The number of this side's tokens that the pages have room for.
  int64_t num_rows() const { return static_cast<int64_t>(pages.size()) * page_size; }
  /// Rows of the list, counted from its first page, that these tokens have.
  IndexRange rows(IndexRange tokens) const;
};

/// Throws std::invalid_argument unless the pages have room for the tokens that this side holds.
void check_holds(const KVPageList& list, IndexRange tokens);

/// Returns the tokens whose pages this side has if its group stripes them: ascending ranges with
/// gaps between them. Without a group it has all tokens.
std::vector<IndexRange> tokens_of_shard(const KVPageList& list, IndexRange tokens);

/// Throws std::invalid_argument if a page that receives some of the tokens is in the list twice, up
/// to the last of the tokens: tokens of the sequence that it already holds would be overwritten.
void check_pages_distinct(const KVPageList& dst, IndexRange tokens);

/// Returns the tokens that both sides hold, as the least number of runs of slots (page * page_size
/// + row of each side's own pages), ascending in the destination. The lists have room for these
/// tokens, and `src` holds all tokens of its pages (dcp_size 1). Throws std::invalid_argument for
/// page ids outside the buffers, and a slot of the destination that gets two tokens.
std::vector<TransferRun> token_runs(
    const KVPageList& src, const KVPageList& dst, IndexRange tokens
);

}  // namespace cpattn
