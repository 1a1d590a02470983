// SPDX-License-Identifier: Apache-2.0
#include "cpattn/distributed/key_scratch.h"

#include "cpattn/base/check.h"
#include "cpattn/distributed/held_rows.h"

namespace cpattn {

KeyScratch plan_key_scratch(
    const std::shared_ptr<const BatchKeys>& keys,
    const NewTokens& tokens,
    const TokenRows& rows,
    std::span<const int64_t> rows_per_rank,
    const KeyPart& part,
    std::optional<int64_t> window
) {
  constexpr CheckFor kCheck{"plan_key_scratch"};
  const BatchPages& pages = keys->pages();
  kCheck(
      std::ssize(rows_per_rank) == keys->num_ranks(), "rows_per_rank must be of ",
      keys->num_ranks(), " ranks, got ", rows_per_rank.size()
  );
  KeyScratch scratch{.block_tables = padded_table(pages, tokens.padding)};
  std::vector<int64_t> first_slot;  // of each request
  int32_t page = 0;
  for (std::size_t i = 0; i < scratch.block_tables.values.size(); ++i) {
    if (i % scratch.block_tables.columns == 0) first_slot.push_back(page * pages.page_size);
    int32_t& id = scratch.block_tables.values[i];
    if (id >= 0) id = page++;
  }
  scratch.num_slots = page * pages.page_size;
  const std::vector<int64_t> first = first_seen(pages, tokens, window);
  std::size_t row = 0;  // among the new tokens of all ranks
  for (int64_t rank = 0; rank < keys->num_ranks(); ++rank) {
    std::vector<int64_t>& sent = scratch.sent_rows.emplace_back();
    const LocalKeys held = KeyShare(keys, {rank}).local_keys();
    for (std::size_t i = 0; i < held.row.size(); ++i) {
      const int64_t request = held.request[i], position = held.position[i];
      const bool is_cached = position < pages.kv_lens[request] - tokens.q_lens[request];
      if (position < first[request] || !(is_cached ? part.cached : part.new_in_pools)) continue;
      sent.push_back(held.row[i]);
      scratch.slots.push_back(first_slot[request] + position);
    }
    for (int64_t i = 0; part.new_rows && i < rows_per_rank[rank]; ++i, ++row) {
      kCheck(row < rows.request.size(), "rows must be as many as ranks have");
      const int64_t request = rows.request[row], position = rows.position[row];
      const bool is_padding = position >= pages.kv_lens[request];
      scratch.new_rows.push_back(std::ssize(scratch.slots));
      scratch.slots.push_back(is_padding ? -1 : first_slot[request] + position);
    }
  }
  return scratch;
}

}  // namespace cpattn
