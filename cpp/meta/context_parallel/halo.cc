// SPDX-License-Identifier: Apache-2.0
#include "cpattn/context_parallel/halo.h"

#include <algorithm>
#include <numeric>
#include <tuple>
#include <vector>

#include "cpattn/base/check.h"

namespace cpattn {
namespace {

using HaloInts = HaloPlan::Ints;

/// Consecutive rows that a segment needs, on the rank that has them.
struct HaloPiece {
  int64_t owner, request, begin, end;  // positions
  int64_t row;                         // of `begin` on the owner

  auto key() const { return std::tie(owner, request, begin); }
};

void add_range(HaloInts& out, int64_t first, int64_t count) {
  out.resize(out.size() + count);
  std::iota(out.end() - count, out.end(), first);
}

class HaloPlanner {
 public:
  HaloPlanner(const RankRows& rows, int64_t window, int64_t ratio)
      : rows_(consecutive(rows)),
        window_(window),
        ratio_(ratio),
        by_request_(rows_.by_request()),
        before_(rows_.num_segments(), -1) {
    for (const HaloInts& segments : by_request_) {
      for (std::size_t i = 1; i < segments.size(); ++i) {
        // A request that each rank has whole has no segment before another.
        const bool follows = end_of(segments[i - 1]) <= rows_.position[segments[i]];
        before_[segments[i]] = follows ? segments[i - 1] : before_[segments[i - 1]];
      }
    }
  }

  HaloPlan plan(int64_t rank) const;

 private:
  int64_t end_of(int64_t i) const { return rows_.position[i] + rows_.count[i]; }
  /// The end of the first unit whose last row is in a segment or after it.
  int64_t first_unit_end(int64_t i) const { return (rows_.position[i] / ratio_ + 1) * ratio_; }
  /// The first position that a segment needs.
  int64_t halo_begin(int64_t i) const {
    const int64_t unit_end = first_unit_end(i);
    if (unit_end > end_of(i)) return rows_.position[i];
    return std::max(unit_end - window_, int64_t{0});
  }
  HaloPiece piece_from(int64_t segment, int64_t low) const;
  std::vector<HaloPiece> pieces_before(int64_t segment) const;
  template <class Wanted>
  std::vector<HaloPiece> received(int64_t rank, Wanted is_wanted) const;
  void add_units(int64_t segment, HaloPlan& plan) const;

  RankRows rows_;  // with step 1
  int64_t window_, ratio_;
  std::vector<HaloInts> by_request_;
  HaloInts before_;  // the segment before each in its request, -1 for none
};

/// The rows of a segment from position `low` on.
HaloPiece HaloPlanner::piece_from(int64_t segment, int64_t low) const {
  const int64_t begin = std::max(rows_.position[segment], low);
  return {
      .owner = rows_.rank[segment],
      .request = rows_.request[segment],
      .begin = begin,
      .end = end_of(segment),
      .row = rows_.row[segment] + begin - rows_.position[segment],
  };
}

/// The new rows that a segment needs before it, in the order of their positions.
std::vector<HaloPiece> HaloPlanner::pieces_before(int64_t segment) const {
  const int64_t low = std::max(halo_begin(segment), rows_.prefix_lens[rows_.request[segment]]);
  std::vector<HaloPiece> pieces;
  for (int64_t i = before_[segment]; i >= 0 && end_of(i) > low; i = before_[i]) {
    pieces.push_back(piece_from(i, low));
  }
  std::ranges::reverse(pieces);
  return pieces;
}

/// The rows that a rank receives from owners for which is_wanted(owner), each once, in the order in
/// which they arrive.
template <class Wanted>
std::vector<HaloPiece> HaloPlanner::received(int64_t rank, Wanted is_wanted) const {
  std::vector<HaloPiece> pieces;
  for (const HaloInts& segments : by_request_) {
    std::size_t from = 0;  // segments before it end before all rows still needed
    int64_t done = 0;      // rows before it are planned
    for (std::size_t i = 0; i < segments.size(); ++i) {
      const int64_t needing = segments[i], request = rows_.request[needing];
      if (rows_.rank[needing] != rank || halo_begin(needing) >= rows_.position[needing]) continue;
      const int64_t low = std::max({halo_begin(needing), rows_.prefix_lens[request], done});
      while (from < i && end_of(segments[from]) <= low) ++from;
      for (std::size_t k = from; k < i; ++k) {
        const HaloPiece piece = piece_from(segments[k], low);
        if (piece.begin < rows_.position[needing] && is_wanted(piece.owner))
          pieces.push_back(piece);
      }
      done = rows_.position[needing];
    }
  }
  std::ranges::sort(pieces, {}, &HaloPiece::key);
  return pieces;
}

/// Adds the units whose last row is in a segment; the segment's rows are the last extended ones.
void HaloPlanner::add_units(int64_t segment, HaloPlan& plan) const {
  const int64_t first = plan.extended_indptr.end()[-2];
  const int64_t begin = halo_begin(segment);
  for (int64_t end = first_unit_end(segment); end <= end_of(segment); end += ratio_) {
    const int64_t from = std::max(end - window_, int64_t{0});
    plan.unit_request.push_back(rows_.request[segment]);
    plan.unit_ids.push_back(end / ratio_ - 1);
    plan.unit_starts.push_back(first + from - begin);
    plan.unit_lens.push_back(end - from);
  }
}

HaloPlan HaloPlanner::plan(int64_t rank) const {
  const int64_t size = rows_.cp_size();
  HaloPlan plan{
      .send_counts = HaloInts(size), .recv_counts = HaloInts(size), .extended_indptr = HaloInts(1)
  };
  for (int64_t other = 0; other < size; ++other) {
    if (other == rank) continue;
    for (const HaloPiece& piece :
         received(other, [rank](int64_t owner) { return owner == rank; })) {
      add_range(plan.send_indices, piece.row, piece.end - piece.begin);
      plan.send_counts[other] += piece.end - piece.begin;
    }
  }
  const auto arriving = received(rank, [rank](int64_t owner) { return owner != rank; });
  HaloInts first_rows;  // of each piece, among own and received rows
  int64_t row = rows_.num_rows(rank);
  for (const HaloPiece& piece : arriving) {
    first_rows.push_back(row);
    plan.recv_counts[piece.owner] += piece.end - piece.begin;
    row += piece.end - piece.begin;
  }
  for (int64_t i = rows_.segment_indptr[rank]; i < rows_.segment_indptr[rank + 1]; ++i) {
    const int64_t request = rows_.request[i], begin = halo_begin(i);
    const int64_t cached_end = std::min(rows_.prefix_lens[request], rows_.position[i]);
    if (const int64_t cached = cached_end - begin; cached > 0) {
      add_range(plan.extended_indices, row, cached);
      add_range(plan.cached_position, begin, cached);
      plan.cached_request.insert(plan.cached_request.end(), cached, request);
      row += cached;
    }
    for (const HaloPiece& piece : pieces_before(i)) {
      int64_t first = piece.row;
      if (piece.owner != rank) {  // it is in the last run that begins no later
        const auto run = std::ranges::upper_bound(arriving, piece.key(), {}, &HaloPiece::key) - 1;
        first = first_rows[run - arriving.begin()] + piece.begin - run->begin;
      }
      add_range(plan.extended_indices, first, piece.end - piece.begin);
    }
    add_range(plan.extended_indices, rows_.row[i], rows_.count[i]);
    plan.segment_request.push_back(request);
    plan.halo_lens.push_back(rows_.position[i] - begin);
    plan.extended_indptr.push_back(static_cast<int64_t>(plan.extended_indices.size()));
    add_units(i, plan);
  }
  return plan;
}

}  // namespace

void check_unit(const char* function, int64_t window, int64_t ratio) {
  check(
      ratio >= 1 && ratio <= INT32_MAX, function, ": ratio must be >= 1 and fit into int32, got ",
      ratio
  );
  check(
      window >= ratio && window <= INT32_MAX, function, ": window must be >= ratio = ", ratio,
      " and fit into int32, got ", window
  );
}

HaloPlan plan_halo(
    const RankRows& rows, int64_t rank, int64_t window, int64_t ratio, const char* function
) {
  check_unit(function, window, ratio);
  return HaloPlanner(rows, window, ratio).plan(rank);
}

}  // namespace cpattn
