// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "cpattn/transfer/kv_layout.h"

namespace cpattn {

/// An entry of the source, the destination entry that receives it, and the heads that are sent.
struct KVPair {
  const KVEntry* src = nullptr;
  const KVEntry* dst = nullptr;
  IndexRange heads;
  bool whole_rows = true;  // of a token: these are all heads that either side has
  bool src_heads_first = false;
  bool dst_heads_first = false;

  /// Whether a page of one side is a page of the other, if pages of both have equally many tokens.
  bool whole_pages() const { return whole_rows && src_heads_first == dst_heads_first; }
  bool by_heads() const { return src_heads_first || dst_heads_first; }

  /// Whether a side elided the buffer: then it is a pair, and nothing moves.
  bool is_elided() const { return src->is_elided() || dst->is_elided(); }
};

/// The pairs of a link, in the order of the source's entries. Layers that only one side answers
/// for, and heads that another replica sends, have no pair. Errors are those of plan_kv_transfer.
std::vector<KVPair> pair_entries(const KVLayout& src, const KVLayout& dst);

/// Keeps the layers that this rank sends if ranks share out the layers.
void keep_layer_share(std::vector<KVPair>& pairs, int64_t cp_rank, int64_t cp_size);

}  // namespace cpattn
