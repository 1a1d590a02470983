// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "cpattn/context_parallel/exchanges.h"
#include "cpattn/distributed/key_share.h"

namespace cpattn {

/// The first key of each request that a query sees of whose own position a window shows so many
/// before; the length of a request without queries, padding ones counted.
std::vector<int64_t> first_seen(
    const BatchPages& pages, const NewTokens& tokens, std::optional<int64_t> window
);

/// Counts the rows of each rank, of which `rows_per_rank` has those that it computes, and `owners`
/// the rank that keeps each of these, rank after rank; -1 for none.
HeldRows held_rows(
    const std::shared_ptr<const BatchKeys>& keys,
    const NewTokens& tokens,
    std::span<const int64_t> rows_per_rank,
    std::span<const int64_t> owners,
    std::optional<int64_t> window
);

}  // namespace cpattn
