// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "cpattn/context_parallel/exchanges.h"
#include "cpattn/distributed/key_share.h"

namespace cpattn {

/// The position of the first key of each request that a query sees, with a window of `window` keys
/// before the query; for a request without queries, padding ones counted, its length.
std::vector<int64_t> first_seen(
    const BatchPages& pages, const NewTokens& tokens, std::optional<int64_t> window
);

/// Counts the rows of each rank. `rows_per_rank` has the number of rows that each rank computes,
/// `owners` the rank that keeps each of these rows, rank after rank; -1 for none.
HeldRows held_rows(
    const std::shared_ptr<const BatchKeys>& keys,
    const NewTokens& tokens,
    std::span<const int64_t> rows_per_rank,
    std::span<const int64_t> owners,
    std::optional<int64_t> window
);

}  // namespace cpattn
