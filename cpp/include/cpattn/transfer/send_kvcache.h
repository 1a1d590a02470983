// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "cpattn/transfer/kv_pointers.h"
#include "cpattn/transfer/transfer_plan.h"

namespace cpattn {

// The plans of the engines' senders. They take lists of buffers and return blocks, from each source
// buffer to the destination buffer that kv_pointers.h finds for it. An item is a page of a KV
// buffer or a slot of another buffer; the source's item length addresses both sides.
//
// Functions are strict unless `compat` is set: they check everything that the lists determine, and
// throw std::invalid_argument that names side and entry. With `compat` nothing is checked; where
// engines run off the end of a list, std::out_of_range is thrown (IndexError in Python).

/// Lists of one call, parallel on each side.
struct SendBuffers {
  std::span<const uint64_t> src_addrs;
  std::span<const uint64_t> src_data_lens;  // bytes of a buffer; empty if unknown
  std::span<const uint64_t> src_item_lens;  // bytes of an item
  std::span<const uint64_t> dst_addrs;
  std::span<const uint64_t> dst_item_lens;  // bytes of an item; empty if unknown
  std::span<const int64_t> src_layer_ids;   // the layer of an entry; empty if unknown
  std::span<const int64_t> dst_layer_ids;
};

/// The destination entry of a source entry that is not sent.
constexpr int64_t kElided = -1;

/// The i-th source item becomes the i-th destination item.
struct SendItems {
  std::span<const int64_t> src;
  std::span<const int64_t> dst;
};

/// The sender's place in the model. With pp_size 1 it has the whole model and lists pair by
/// position; a destination's draft tail is left alone. The stage's groups are used with MLA only.
struct SendStage {
  KVStage kv;
  std::optional<int64_t> prefill_end_layer;  // one past its last layer; for strict plans
  int64_t pp_size = 1;
  bool is_mla = false;
};

/// Plans one block for each entry and run of pages, entry-major in the order of the source's list.
/// If either list of pages is empty there is nothing to send. If both sides give layer ids, entries
/// pair by them in any stage; if one side does, by position with one stage, else std::runtime_error
/// is thrown as by build_transfer_entry_pairs. Strict plans require that the destination has a
/// layer of the source as often as the source.
TransferPlan plan_send_kvcache(
    const SendBuffers& buffers, const SendItems& pages, const SendStage& stage, bool compat
);

/// Heads of a page that one tensor-parallel rank sends to another.
struct HeadSlice {
  int64_t src_start = 0;  // the first head within the source's page
  int64_t dst_start = 0;  // the first head within the destination's page
  int64_t num_heads = 0;
  int64_t src_heads = 0;  // all heads of a page of the source
  int64_t dst_heads = 0;  // all heads of a page of the destination
};

/// Returns the heads that src_rank sends to dst_rank. Ranks have equal shares of the heads in
/// order; with more ranks than heads, neighbours have the same head. Throws std::invalid_argument
/// unless one size divides the other, heads divide evenly and the two ranks have heads in common;
/// with `compat` nothing is checked.
HeadSlice slice_heads(
    int64_t total_kv_heads,
    int64_t src_tp_size,
    int64_t src_rank,
    int64_t dst_tp_size,
    int64_t dst_rank,
    bool compat
);

/// Plans K and V between ranks with different heads: a block for each entry and token, or for each
/// run where all heads of both sides go. All items of a side have one length, at the destination
/// dst_item_lens[0].
TransferPlan plan_send_kvcache_slice(
    const SendBuffers& buffers,
    const SendItems& pages,
    int64_t page_size,
    const HeadSlice& heads,
    const SendStage& stage,
    bool compat
);

/// Plans a request's metadata: items of buffers that pair by position. With `compat` only as many
/// buffers as the shorter list has.
TransferPlan plan_send_aux(const SendBuffers& buffers, const SendItems& items, bool compat);

/// The blocks of all plans, one plan after the other.
TransferPlan concatenate(std::span<const TransferPlan> plans);

}  // namespace cpattn
