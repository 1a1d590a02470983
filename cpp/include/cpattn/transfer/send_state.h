// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "cpattn/transfer/send_kvcache.h"

namespace cpattn {

/// Facts by which the entries of a component of state are paired. An item length of 0 marks an
/// entry that a side elided: layers that reuse the top-k of another keep no index keys.
struct StateEntries {
  std::optional<int64_t> prefill_start_layer;
  std::optional<int64_t> prefill_end_layer;  // one past the target layers, to tell drafts
  int64_t pp_size = 1;
  bool is_flat = true;             // an entry per layer; a stage's are consecutive
  bool has_dst_item_lens = false;  // else those of SendBuffers are not known
  bool allow_dst_elision = false;  // else only the source may leave out entries
};

/// Returns the destination entry of every source entry, or kElided if nothing moves. Entries pair
/// by layer ids like build_transfer_entry_pairs, which may throw std::runtime_error; without ids by
/// position if both sides have equally many, else in flat components from prefill_start_layer on.
/// Throws std::invalid_argument for counts, lengths or drafts that do not fit; with `compat` only
/// for lengths, and std::out_of_range where engines run off the end of a list.
std::vector<int64_t> state_entries(
    const SendBuffers& buffers, const StateEntries& entries, bool compat
);

/// Plans the items of a component of state, entry-major, without elided entries.
TransferPlan plan_send_state(
    const SendBuffers& buffers, const SendItems& items, const StateEntries& entries, bool compat
);

}  // namespace cpattn
