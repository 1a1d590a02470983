// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "cpattn/context_parallel/context_parallel.h"
#include "cpattn/context_parallel/pcp_layout.h"

namespace cpattn {

/// The rows of all ranks in segments: `count` rows of a request, `step` positions apart, cached
/// tokens counted. Segments stand in the order of the rows, one rank after the other; those of rank
/// r are [segment_indptr[r], segment_indptr[r + 1]).
struct RankRows {
  using Ints = std::vector<int64_t>;

  Ints prefix_lens;                    // [bs]
  Ints segment_indptr;                 // [cp_size + 1]
  Ints rank, request, position, step;  // of each segment
  Ints row, count;                     // its first row on its rank, and its rows

  int64_t cp_size() const { return static_cast<int64_t>(segment_indptr.size()) - 1; }
  int64_t num_segments() const { return segment_indptr.back(); }
  int64_t num_rows(int64_t of_rank) const;
  /// The segments of each request, in the order of their positions.
  std::vector<Ints> by_request() const;
  /// Whether each rank has a request whole, for each request. Only a PcpLayout has such requests.
  std::vector<uint8_t> whole_on_each_rank() const;
};

/// The logical rows of all ranks. No segment is empty. A request of a PcpLayout may be whole on
/// each rank.
RankRows rank_rows(const ContextParallelMetadata& metadata);
RankRows rank_rows(const PcpLayout& layout);

/// Returns the same rows in segments of step 1: a row of another step becomes a segment of its own.
RankRows consecutive(const RankRows& rows);

}  // namespace cpattn
