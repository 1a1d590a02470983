// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "cpattn/base/index_table.h"

namespace cpattn {

/// The pages of a batch that hold keys: those of request i are ids[indptr[i]] .. ids[indptr[i +
/// 1]], and its position p is slot ids[indptr[i] + p / page_size] * page_size + p % page_size.
struct BatchPages {
  int64_t page_size = 1;
  std::vector<int64_t> kv_lens;  // [bs]
  std::vector<int64_t> indptr;   // [bs + 1]
  std::vector<int32_t> ids;

  int64_t bs() const { return static_cast<int64_t>(kv_lens.size()); }
  int64_t slot(int64_t request, int64_t position) const {
    return int64_t{ids[indptr[request] + position / page_size]} * page_size + position % page_size;
  }
};

/// Reads the first ceil(kv_lens[i] / page_size) entries of each row of block tables. Throws
/// std::invalid_argument, in the name of `function`, for lengths below 0, tables of other rows or
/// too few columns, and entries outside int32 or below 0.
BatchPages read_batch_pages(
    const char* function,
    const IndexTable& block_tables,
    std::span<const int64_t> kv_lens,
    int64_t page_size
);

/// The pages as a table [bs, columns], -1 after the last of each request. The last request gets
/// `padding` more tokens, for which its first page, or else page 0, is repeated; there are as many
/// columns as the longest row needs.
struct PaddedTable {
  int64_t columns = 0;
  std::vector<int32_t> values;
};
PaddedTable padded_table(const BatchPages& pages, int64_t padding);

/// New tokens of a batch: the last q_lens[i] tokens of request i.
struct NewTokens {
  std::span<const int64_t> q_lens;  // [bs]
  int64_t padding = 0;              // tokens after those of the last request, without slots
};

/// The slot of each new token, request after request; -1 for padding.
std::vector<int64_t> new_slots(const BatchPages& pages, const NewTokens& tokens);

/// Request and position of each new token, with padding after the last ones. Token i is at rows[i],
/// where rows is a permutation; without rows, at i.
struct TokenRows {
  std::vector<int64_t> request, position;
};
TokenRows token_rows(
    const BatchPages& pages,
    const NewTokens& tokens,
    const std::optional<std::vector<int64_t>>& rows
);

/// Throws std::invalid_argument, in the name of `function`, where two new tokens have one slot.
void refuse_shared_slots(const char* function, const BatchPages& pages, const NewTokens& tokens);

/// Whether a cached token, one before its request's new tokens, is in the slot of a new token.
bool caches_new_tokens(const BatchPages& pages, const NewTokens& tokens);

/// Checks the slots that a caller gives new tokens: -1, the token's own slot, or for padding any
/// slot >= 0; only padding may share one. Returns a digest of the slots that differ from new_slots,
/// 0 for none.
uint64_t check_slots(
    const char* function,
    const BatchPages& pages,
    const NewTokens& tokens,
    std::span<const int64_t> slots
);

/// A 64-bit digest of the values, equal on every machine. It does not withstand an adversary.
uint64_t digest_of(std::span<const int32_t> values);

}  // namespace cpattn
