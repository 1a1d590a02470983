// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "cpattn/context_parallel/rank_rows.h"

namespace cpattn {

/// One rank's part in an exchange for units that are made of several rows. Unit u of a request is
/// made of the rows (u + 1) * ratio - window .. (u + 1) * ratio - 1, without those before the
/// request; a convolution has ratio 1. The rank with the last row of a unit computes the unit.
///
/// Indices of rows count all rows of a rank after the exchange: its own, received ones in the order
/// of ranks, and those that it reads from a cache. The extended rows of a segment are its halo, the
/// rows before it, and its own rows.
struct HaloPlan {
  using Ints = std::vector<int64_t>;

  Ints send_indices;                     // own rows, in the order in which they are sent
  Ints send_counts, recv_counts;         // [cp_size] rows to and from each rank, 0 for this one
  Ints cached_request, cached_position;  // rows that are read from a cache

  Ints segment_request;   // [n]
  Ints halo_lens;         // [n] rows in front of the segment
  Ints extended_indptr;   // [n + 1]
  Ints extended_indices;  // the index of each extended row

  Ints unit_request, unit_ids;  // [m] units whose last row the rank has, by segments
  Ints unit_starts, unit_lens;  // [m] their first extended row, and the number of their rows
};

/// Throws std::invalid_argument, which names `function`, unless 1 <= ratio <= window < 2^31.
void check_unit(const char* function, int64_t window, int64_t ratio);

/// Plans the halo of a rank in [0, cp_size). A halo may reach over several ranks; each interleaved
/// row is a segment of its own. Rows of a request that every rank has whole are not sent, and every
/// rank computes all its units. Throws like check_unit().
HaloPlan plan_halo(
    const RankRows& rows, int64_t rank, int64_t window, int64_t ratio, const char* function
);

/// One rank's part in an exchange that moves rows between two layouts, including rows that stay on
/// the rank.
struct RelayoutPlan {
  using Ints = std::vector<int64_t>;

  Ints send_indices;              // rows of the source, in the order in which they are sent
  Ints recv_indices;              // rows of the target, in the order in which they are received
  Ints send_counts, recv_counts;  // [cp_size] rows to and from each rank, this one included
};

/// Plans the exchange for a rank in [0, cp_size). The layouts have the same requests and ranks.
RelayoutPlan plan_relayout(const RankRows& source, const RankRows& target, int64_t rank);

/// Plans how new rows that later units need go to the ranks that keep them, as the state of a
/// compressor or convolution: in a request with n tokens, the rows from (n / ratio + 1) * ratio -
/// window on. The target has `window` rows for each request; row r * window + p % window is that of
/// position p of request r. Without `keepers` all ranks keep these rows, else rank keepers[r], or
/// all for -1. Rows that every rank has are not sent. Throws like check_unit(), for keepers outside
/// [-1, cp_size), and unless there is one for each request.
RelayoutPlan plan_pending(
    const RankRows& rows,
    int64_t rank,
    int64_t window,
    int64_t ratio,
    std::optional<std::span<const int64_t>> keepers,
    const char* function
);

}  // namespace cpattn
