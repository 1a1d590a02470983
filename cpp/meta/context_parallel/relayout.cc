// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <tuple>

#include "cpattn/context_parallel/halo.h"
#include "meta/context_parallel/relayout_writer.h"

namespace cpattn {
namespace {

/// Tokens of a segment that are also in a segment of another layout.
struct CommonRows {
  int64_t other_rank;
  int64_t row, row_step;              // in the layout of the first
  int64_t other_row, other_row_step;  // in the layout of the second
  int64_t count;
};

/// The tokens that segment i of one layout and j of another both have. If both have steps above 1,
/// these are equal.
CommonRows common_rows(const RankRows& a, int64_t i, const RankRows& b, int64_t j) {
  const int64_t step = std::max(a.step[i], b.step[j]);
  const int64_t low = std::max(a.position[i], b.position[j]);
  const int64_t high = std::min(
      a.position[i] + (a.count[i] - 1) * a.step[i], b.position[j] + (b.count[j] - 1) * b.step[j]
  );
  // The first common position belongs to the segment with the larger step.
  const int64_t phase = a.step[i] >= b.step[j] ? a.position[i] : b.position[j];
  const int64_t first = phase + (low - phase + step - 1) / step * step;
  const bool meet =
      (first - a.position[i]) % a.step[i] == 0 && (first - b.position[j]) % b.step[j] == 0;
  return {
      .other_rank = b.rank[j],
      .row = a.row[i] + (first - a.position[i]) / a.step[i],
      .row_step = step / a.step[i],
      .other_row = b.row[j] + (first - b.position[j]) / b.step[j],
      .other_row_step = step / b.step[j],
      .count = meet && first <= high ? (high - first) / step + 1 : 0,
  };
}

/// The rows that a rank has in common with each rank of another layout, by the latter's ranks.
std::vector<CommonRows> common_of_rank(const RankRows& rows, int64_t rank, const RankRows& other) {
  const std::vector<RankRows::Ints> segments = other.by_request();
  std::vector<CommonRows> common;
  for (int64_t i = rows.segment_indptr[rank]; i < rows.segment_indptr[rank + 1]; ++i) {
    for (const int64_t j : segments[rows.request[i]]) {
      const CommonRows both = common_rows(rows, i, other, j);
      if (both.count > 0) common.push_back(both);
    }
  }
  return common;
}

}  // namespace

RelayoutPlan plan_relayout(const RankRows& source, const RankRows& target, int64_t rank) {
  RelayoutWriter writer(source.cp_size());
  // Sender and receiver order the rows between them by their places in the target.
  std::vector<CommonRows> sent = common_of_rank(source, rank, target);
  std::ranges::sort(sent, {}, [](const CommonRows& rows) {
    return std::tuple(rows.other_rank, rows.other_row);
  });
  for (const CommonRows& rows : sent) {
    writer.send(rows.other_rank, rows.row, rows.count, rows.row_step);
  }
  std::vector<CommonRows> received = common_of_rank(target, rank, source);
  std::ranges::sort(received, {}, [](const CommonRows& rows) {
    return std::tuple(rows.other_rank, rows.row);
  });
  for (const CommonRows& rows : received) {
    writer.receive(rows.other_rank, rows.row, rows.count, rows.row_step);
  }
  return writer.plan();
}

}  // namespace cpattn
