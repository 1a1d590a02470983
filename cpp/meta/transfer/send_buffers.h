// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <stdexcept>
#include <vector>

#include "cpattn/base/check.h"
#include "cpattn/transfer/send_kvcache.h"

namespace cpattn {

/// Returns values[i], or throws std::out_of_range where a Python list raises IndexError.
template <class List>
auto at(const List& values, std::size_t i, const char* function, const char* list) {
  if (i >= values.size()) {
    throw std::out_of_range(
        concat(function, ": list index out of range: ", list, "[", i, "] of ", values.size())
    );
  }
  return values[i];
}

/// Checks that the source's lists are equally long.
void check_list_sizes(const char* function, const SendBuffers& buffers);

/// Checks what check_list_sizes() does, and that no item length is zero.
void check_buffers(const char* function, const SendBuffers& buffers);

/// Whether a side gives the layers of its entries.
inline bool has_layer_ids(const SendBuffers& buffers) {
  return !buffers.src_layer_ids.empty() || !buffers.dst_layer_ids.empty();
}

/// Returns the destination entry of every source entry by the layer ids of one or both sides, like
/// build_transfer_entry_pairs with its fallback for one stage.
std::vector<int64_t> entries_by_ids(const SendBuffers& buffers, int64_t pp_size);

/// Returns the destination entry of every source entry.
std::vector<int64_t> destination_entries(
    const char* function, const SendBuffers& buffers, const SendStage& stage, bool compat
);

/// Names the contents of the source's i-th KV entry, for readers of the plan.
const char* part_of(std::size_t i, std::size_t num_src, const SendStage& stage);

/// Checks that all items lie within their buffers: between 0 and the end of the buffer if known, or
/// else of the address space. dst_entries[i] receives entry i, none if it is negative.
void check_items(
    const char* function,
    const SendBuffers& buffers,
    const SendItems& items,
    std::span<const int64_t> dst_entries,
    std::span<const uint64_t> dst_item_lens
);

/// Plans whole items, source entry i into dst_entries[i], or not if that is negative. `what` is
/// for messages and readers of the plan. With `compat`, as many items as the shorter list has.
TransferPlan plan_paired_items(
    const char* function,
    const char* what,
    const SendBuffers& buffers,
    const SendItems& items,
    std::span<const int64_t> dst_entries,
    bool compat
);

}  // namespace cpattn
