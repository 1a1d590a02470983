// SPDX-License-Identifier: Apache-2.0
#include "cpattn/distributed/sequence_call.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "meta/distributed/seen_rows.h"

namespace cpattn {
namespace {

bool comes_before(const SeenRow& a, const SeenRow& b) {
  return std::tie(a.request, a.position, a.row) < std::tie(b.request, b.position, b.row);
}

bool is_ascending(const std::vector<SeenRow>& rows) {
  return std::is_sorted(rows.begin(), rows.end(), comes_before);
}

/// Sorts rows that consist of few ascending stretches, like the rows of ranks.
void sort_rows(std::vector<SeenRow>& rows) {
  if (is_ascending(rows)) return;
  using Stretch = std::pair<std::size_t, std::size_t>;  // of one request
  std::vector<Stretch> stretches;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const bool follows =
        i > 0 && rows[i].request == rows[i - 1].request && rows[i].position >= rows[i - 1].position;
    if (!follows) stretches.emplace_back(i, i);
    ++stretches.back().second;
  }
  const auto first_before = [&rows](const Stretch& a, const Stretch& b) {
    return comes_before(rows[a.first], rows[b.first]);
  };
  std::sort(stretches.begin(), stretches.end(), first_before);
  std::vector<SeenRow> sorted;
  sorted.reserve(rows.size());
  for (const auto& [begin, end] : stretches) {
    sorted.insert(sorted.end(), rows.begin() + begin, rows.begin() + end);
  }
  if (!is_ascending(sorted)) std::sort(sorted.begin(), sorted.end(), comes_before);
  rows = std::move(sorted);
}

/// The rows that see a key of the share, in the order of request and position.
std::vector<SeenRow> seen_rows(
    const KeyShare& share, const QueryRows& rows, const RowVisibility& visibility
) {
  const std::vector<int64_t>& lens = share.keys().pages().kv_lens;
  const auto bs = static_cast<int64_t>(lens.size());
  check_call(
      rows.request.size() == rows.position.size(), "request and position must have the same size, ",
      "got ", rows.request.size(), " and ", rows.position.size()
  );
  std::vector<SeenRow> seen;
  seen.reserve(rows.request.size());
  const auto [left, right] = visibility.window.value_or(KeyWindow{});
  for (std::size_t i = 0; i < rows.request.size(); ++i) {
    const int64_t request = rows.request[i], position = rows.position[i];
    check_call(
        request >= 0 && request < bs, "request must be in [0, ", bs, "), got ", request,
        " at index ", i
    );
    check_call(position >= 0, "position must be >= 0, got ", position, " at index ", i);
    const int64_t len = lens[request];
    const int64_t after = visibility.causal ? 0 : right.value_or(len);
    const int64_t end = position < len ? std::min(len - position - 1, after) + position + 1 : len;
    const int64_t begin = left ? std::clamp<int64_t>(position - *left, 0, len) : 0;
    const int64_t last = share.count_below(request, end);
    const int64_t first = begin == 0 ? 0 : share.count_below(request, begin);
    if (last <= first) continue;
    seen.push_back({request, position, static_cast<int64_t>(i), first, last});
  }
  sort_rows(seen);
  return seen;
}

/// The call of rows in the order of request and position, a sequence for each request.
SequenceCall ranged_call(const LocalPages& pages, const std::vector<SeenRow>& rows) {
  CallBuilder call(pages);
  std::vector<int64_t> ranges;
  ranges.reserve(2 * rows.size());
  for (std::size_t i = 0; i < rows.size(); ++i) {
    call.add_row(rows[i]);
    ranges.insert(ranges.end(), {rows[i].first, rows[i].last});
    if (i + 1 < rows.size() && rows[i + 1].request == rows[i].request) continue;
    call.end_sequence(rows[i].request, 0, rows[i].last);
  }
  SequenceCall made = call.finish();
  made.key_ranges = std::move(ranges);
  return made;
}

}  // namespace

std::optional<SequenceCall> sequence_call(
    const KeyShare& share,
    const LocalPages& pages,
    const QueryRows& rows,
    const RowVisibility& visibility
) {
  check_key_window("sequence_call", visibility.window);
  const std::size_t bs = share.keys().pages().kv_lens.size();
  check_call(
      pages.indptr.size() == bs + 1, "pages must be of ", bs, " requests, got ",
      pages.indptr.size() - 1
  );
  const std::vector<SeenRow> seen = seen_rows(share, rows, visibility);
  if (seen.empty()) return std::nullopt;
  return visibility.mask ? masked_call(share, pages, seen, *visibility.mask)
                         : ranged_call(pages, seen);
}

}  // namespace cpattn
