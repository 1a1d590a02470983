// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "cpattn/context_parallel/rank_rows.h"

namespace cpattn {

/// One rank's part in an exchange by which units are made of several rows. Unit u of a
/// request is made of the rows (u + 1) * ratio - window .. (u + 1) * ratio - 1, without those
/// before the request; a convolution has ratio 1. The rank that has the last row of a unit computes
/// it.
///
/// Rows are counted through all that a rank has then: its own, those it has received, of rank 0
/// first, and those it reads from a cache. "Extended" are the rows that each of its segments is
/// computed from: those before it, the halo, and its own.
struct HaloPlan {
  using Ints = std::vector<int64_t>;

  Ints send_indices;                     // own rows, in the order in which they are sent
  Ints send_counts, recv_counts;         // [cp_size] rows to and from each rank, 0 for this one
  Ints cached_request, cached_position;  // rows that are read from a cache

  Ints segment_request;   // [n]
  Ints halo_lens;         // [n] rows in front of the segment
  Ints extended_indptr;   // [n + 1]
  Ints extended_indices;  // the row of each extended one

  Ints unit_request, unit_ids;  // [m] units whose last row the rank has, by segments
  Ints unit_starts, unit_lens;  // [m] their first extended row, and the number of their rows
};

/// Throws std::invalid_argument, which names `function`, unless 1 <= ratio <= window < 2^31.
void check_unit(const char* function, int64_t window, int64_t ratio);

/// Plans the halo of a rank in [0, cp_size). A halo reaches as far as it must, over several ranks,
/// too; a row of interleaved ones is a segment of its own. Of a request that each rank has whole
/// nothing is sent, and each rank computes all units. Throws as check_unit().
HaloPlan plan_halo(
    const RankRows& rows, int64_t rank, int64_t window, int64_t ratio, const char* function
);

/// One rank's part in an exchange by which rows go from one layout to another, rows that stay on
/// the rank among them.
struct RelayoutPlan {
  using Ints = std::vector<int64_t>;

  Ints send_indices;              // rows of the source, in the order in which they are sent
  Ints recv_indices;              // the row in the target of each that is received, in that order
  Ints send_counts, recv_counts;  // [cp_size] rows to and from each rank, this one included
};

/// Plans how the rows of a rank in [0, cp_size) change. Both have the same requests and ranks.
RelayoutPlan plan_relayout(const RankRows& source, const RankRows& target, int64_t rank);

/// Plans how new rows that units to come are made of go to the ranks that keep them, as the state
/// of a compressor or convolution: of a request with n tokens those from (n / ratio + 1) * ratio -
/// window on. The target has `window` rows for each request; row r * window + p % window is that of
/// position p of request r. Without `keepers` all ranks keep them, else rank keepers[r], or all for
/// -1. Rows that every rank has are not sent. Throws as check_unit(), and for keepers outside
/// [-1, cp_size), or not one for each request.
RelayoutPlan plan_pending(
    const RankRows& rows,
    int64_t rank,
    int64_t window,
    int64_t ratio,
    std::optional<std::span<const int64_t>> keepers,
    const char* function
);

}  // namespace cpattn
