// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "cpattn/transfer/kv_layout.h"
#include "cpattn/transfer/transfer_plan.h"

namespace cpattn {

/// Steps of a walk over the tokens of a sequence. More are hours and tens of gigabytes, which the
/// layout of a peer could ask for.
constexpr int64_t kMaxSteps = int64_t{1} << 24;

/// Appends a run, or makes the last one longer where it goes on on both sides.
void append_run(std::vector<TransferRun>& runs, TransferRun run);

/// Sorts runs by destination, and returns whether they were in another order.
bool sort_by_destination(std::vector<TransferRun>& runs);

/// Pages in which one side keeps the tokens of a sequence. All counts may also be in pages instead
/// of tokens, with a page_size of 1 then.
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

  /// Tokens below `token` that this side holds: the position of `token` there if it does.
  int64_t owned_below(int64_t token) const;
  /// Tokens of this side that the pages have room for.
  int64_t num_rows() const { return static_cast<int64_t>(pages.size()) * page_size; }
  /// Rows of the list, counted from its first page, that these tokens have.
  IndexRange rows(IndexRange tokens) const;
};

/// Throws std::invalid_argument unless the pages have room for these tokens, or for those of them
/// that this side holds.
void check_holds(const KVPageList& list, IndexRange tokens);

/// Returns the tokens whose pages this side has, where its group stripes them: ranges in ascending
/// order, none of which begins where another ends. Without a group it has all of them.
std::vector<IndexRange> tokens_of_shard(const KVPageList& list, IndexRange tokens);

/// Throws std::invalid_argument if a page that receives some of the tokens is in the list twice, up
/// to the last of them: tokens of the sequence that are there already would be overwritten.
void check_pages_distinct(const KVPageList& dst, IndexRange tokens);

/// Returns those of the tokens that both sides hold, as the least number of runs of slots
/// (page * page_size + row, of this side's own pages), in ascending order of the destination. Both
/// lists have room for them, and `src` holds all of its pages' (dcp_size 1). Throws
/// std::invalid_argument for page ids outside the buffers, and a slot of the destination that gets
/// two tokens.
std::vector<TransferRun> token_runs(
    const KVPageList& src, const KVPageList& dst, IndexRange tokens
);

}  // namespace cpattn
