// SPDX-License-Identifier: Apache-2.0
#include "cpattn/distributed/held_rows.h"

#include <algorithm>

#include "cpattn/base/check.h"

namespace cpattn {

std::vector<int64_t> first_seen(
    const BatchPages& pages, const NewTokens& tokens, std::optional<int64_t> window
) {
  std::vector<int64_t> first = pages.kv_lens;
  for (int64_t request = 0; request < pages.bs(); ++request) {
    const int64_t q_len = tokens.q_lens[request];
    const bool has_queries = q_len > 0 || (tokens.padding > 0 && request + 1 == pages.bs());
    if (!has_queries) continue;
    first[request] = window ? std::max<int64_t>(first[request] - q_len - *window, 0) : 0;
  }
  return first;
}

HeldRows held_rows(
    const std::shared_ptr<const BatchKeys>& keys,
    const NewTokens& tokens,
    std::span<const int64_t> rows_per_rank,
    std::span<const int64_t> owners,
    std::optional<int64_t> window
) {
  constexpr CheckFor kCheck{"held_rows"};
  const BatchPages& pages = keys->pages();
  const int64_t num_ranks = keys->num_ranks();
  kCheck(std::ssize(rows_per_rank) == num_ranks, "rows_per_rank must be of ", num_ranks, " ranks");
  const std::vector<int64_t> first = first_seen(pages, tokens, window);
  HeldRows held;
  held.tokens.assign(rows_per_rank.begin(), rows_per_rank.end());
  held.keys.resize(num_ranks);
  held.seen.resize(num_ranks);
  held.new_keys.resize(num_ranks);
  held.arriving.resize(num_ranks);
  for (int64_t rank = 0; rank < num_ranks; ++rank) {
    const KeyShare share(keys, {rank});
    for (int64_t request = 0; request < pages.bs(); ++request) {
      const int64_t count = share.count(request);
      const int64_t cached = pages.kv_lens[request] - tokens.q_lens[request];
      held.keys[rank] += count;
      held.seen[rank] += count - share.count_below(request, first[request]);
      held.new_keys[rank] += count - share.count_below(request, cached);
    }
  }
  std::size_t row = 0;
  for (int64_t rank = 0; rank < num_ranks; ++rank) {
    for (int64_t i = 0; i < rows_per_rank[rank] && row < owners.size(); ++i, ++row) {
      const int64_t owner = owners[row];
      kCheck(owner >= -1 && owner < num_ranks, "owners must be below ", num_ranks, ", got ", owner);
      if (owner >= 0 && owner != rank) ++held.arriving[owner];
    }
  }
  return held;
}

}  // namespace cpattn
