// SPDX-License-Identifier: Apache-2.0
#include "cpattn/distributed/sequence_calls.h"

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
  check_calls(
      rows.request.size() == rows.position.size(), "request and position must have the same size, ",
      "got ", rows.request.size(), " and ", rows.position.size()
  );
  std::vector<SeenRow> seen;
  seen.reserve(rows.request.size());
  const auto [left, right] = visibility.window.value_or(KeyWindow{});
  for (std::size_t i = 0; i < rows.request.size(); ++i) {
    const int64_t request = rows.request[i], position = rows.position[i];
    check_calls(
        request >= 0 && request < bs, "request must be in [0, ", bs, "), got ", request,
        " at index ", i
    );
    check_calls(position >= 0, "position must be >= 0, got ", position, " at index ", i);
    const int64_t len = lens[request];
    const int64_t after = visibility.causal ? 0 : right.value_or(len);
    const int64_t end = position < len ? std::min(len - position - 1, after) + position + 1 : len;
    const int64_t begin = left ? std::clamp<int64_t>(position - *left, 0, len) : 0;
    const int64_t last = share.count_below(request, end);
    const int64_t first = begin == 0 ? 0 : share.count_below(request, begin);
    if (last == 0) continue;
    seen.push_back({request, position, static_cast<int64_t>(i), first, last});
  }
  sort_rows(seen);
  return seen;
}

/// Rows of a request that see the same keys.
struct Group {
  int64_t request, keys;
  std::size_t begin, size;  // in the rows
  bool is_linked = false;   // to the group before, which sees one key less
  bool is_in_chain = false;
};

std::vector<Group> groups_of(const std::vector<SeenRow>& rows) {
  std::vector<Group> groups;
  groups.reserve(rows.size());
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const auto [request, position, row, first, keys] = rows[i];
    if (!groups.empty() && groups.back().request == request && groups.back().keys == keys) {
      ++groups.back().size;
      continue;
    }
    Group group{.request = request, .keys = keys, .begin = i, .size = 1};
    if (!groups.empty() && groups.back().request == request && groups.back().keys == keys - 1) {
      group.is_linked = group.is_in_chain = groups.back().is_in_chain = true;
    }
    groups.push_back(group);
  }
  return groups;
}

/// Whether the rows of groups, without the first of each, make fewer causal sequences, in which
/// each row sees one key more than the previous one (as with tokens dealt out one by one), than
/// sequences whose rows all see the same keys.
bool rise_together(const std::vector<Group>& groups) {
  std::size_t rising = 0, equal = 0;
  for (std::size_t g = 0; g < groups.size(); ++g) {
    const std::size_t size = groups[g].size;
    const std::size_t linked = groups[g].is_linked ? std::min(size, groups[g - 1].size) : 1;
    rising += size - linked;
    equal += size > (groups[g].is_in_chain ? 1 : 0) ? 1 : 0;
  }
  return rising < equal;
}

/// Adds the n-th row of groups of one request, in as few causal sequences as possible.
void add_rising(
    const std::vector<SeenRow>& rows,
    const std::vector<const Group*>& groups,
    std::size_t n,
    CallBuilder& call
) {
  for (std::size_t i = 0; i < groups.size(); ++i) {
    const Group& group = *groups[i];
    call.add_row(rows[group.begin + n]);
    if (i + 1 < groups.size() && groups[i + 1]->keys == group.keys + 1) continue;
    call.end_sequence(group.request, 0, group.keys);
  }
}

void add_plain_calls(
    const LocalPages& pages, const std::vector<SeenRow>& rows, std::vector<SequenceCall>& calls
) {
  // The first rows of groups that see the same keys make causal sequences: one for each request, of
  // the tokens that the rank holds itself. The other rows become sequences of equal rows, or causal
  // ones again, whichever are fewer.
  const std::vector<Group> groups = groups_of(rows);
  const bool all_rise = rise_together(groups);
  CallBuilder rising(pages, /*causal=*/true), equal(pages, /*causal=*/false);
  for (std::size_t g = 0; g < groups.size();) {
    const int64_t request = groups[g].request;
    std::vector<const Group*> of_request;
    for (; g < groups.size() && groups[g].request == request; ++g) {
      if (all_rise || groups[g].is_in_chain) of_request.push_back(&groups[g]);
    }
    for (std::size_t n = 0; !of_request.empty(); ++n) {
      add_rising(rows, of_request, n, rising);
      std::erase_if(of_request, [=](const Group* group) {
        return !all_rise || group->size <= n + 1;
      });
    }
  }
  for (const Group& group : groups) {
    const std::size_t risen = all_rise ? group.size : group.is_in_chain ? 1 : 0;
    if (risen == group.size) continue;
    for (std::size_t n = risen; n < group.size; ++n) equal.add_row(rows[group.begin + n]);
    equal.end_sequence(group.request, 0, group.keys);
  }
  rising.finish(calls);
  equal.finish(calls);
}

}  // namespace

std::vector<SequenceCall> sequence_calls(
    const KeyShare& share,
    const LocalPages& pages,
    const QueryRows& rows,
    const RowVisibility& visibility
) {
  check_key_window("sequence_calls", visibility.window);
  const std::size_t bs = share.keys().pages().kv_lens.size();
  check_calls(
      pages.indptr.size() == bs + 1, "pages must be of ", bs, " requests, got ",
      pages.indptr.size() - 1
  );
  const std::vector<SeenRow> seen = seen_rows(share, rows, visibility);
  std::vector<SequenceCall> calls;
  const auto [left, right] = visibility.window.value_or(KeyWindow{});
  if (left || (right && !visibility.causal) || visibility.mask) {
    add_masked_call(share, pages, seen, visibility.mask, calls);
  } else {
    add_plain_calls(pages, seen, calls);
  }
  return calls;
}

}  // namespace cpattn
