// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <iosfwd>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cpattn/base/kv_axis_order.h"
#include "cpattn/transfer/index_range.h"

namespace cpattn {

enum class KVKind : uint8_t { k, v, index_k, state, k_scale, v_scale };
/// The name of the enumerator, such as "index_k".
const char* kv_kind_name(KVKind kind);
/// The kind of a name; throws std::invalid_argument, which begins with `function`, for any other.
KVKind parse_kv_kind(const char* function, std::string_view name);

/// A registered buffer: the pages of one kind of one layer.
struct KVEntry {
  int64_t layer_id = 0;  // of the whole model; draft layers count from 0 again
  KVKind kind = KVKind::k;
  bool is_draft = false;
  uint64_t addr = 0;
  uint64_t num_bytes = 0;  // to the end of its last page
  uint64_t item_len = 0;   // bytes of a page; 0: this side elided the buffer
  // Whether a page is a row for each of its tokens, or, if heads come first, for each head and
  // token. If not, pages are sent whole or not at all.
  bool token_rows = true;
  // Name of the elements, such as "int8"; empty if unknown. Sides of a pair that name them must
  // agree.
  std::string dtype;
  // Bytes from page to page; none: item_len. Pages of other entries may lie between.
  std::optional<uint64_t> page_stride;
  KVAxisOrder kv_layout = KVAxisOrder::nhd;
  // Name of the order of bytes in pages without token rows, such as the tiles of a kernel; empty
  // for any other. The sides of a pair must agree.
  std::string layout_tag;

  /// Layers that use the top-k of an earlier one need no index keys. Nothing moves for a pair if
  /// either side is elided.
  bool is_elided() const { return item_len == 0; }
  uint64_t stride() const { return page_stride.value_or(item_len); }
  int64_t num_pages() const {
    return num_bytes == 0 ? 0 : static_cast<int64_t>((num_bytes - item_len) / stride() + 1);
  }
  bool operator==(const KVEntry&) const = default;
};
/// Writes an entry as "k of layer 3" or "index_k of draft layer 0".
std::ostream& operator<<(std::ostream& out, const KVEntry& entry);

/// The common sizes of the entries of a side, and the part of the model that the entries hold.
struct KVPlacement {
  int64_t page_size = 0;  // tokens
  int64_t tp_rank = 0;
  int64_t tp_size = 1;
  // Heads of K and V of the whole model, 1 for an MLA latent. None: this side has all heads. Ranks
  // hold equal shares in order; if tp_size is larger, tp_size / total_kv_heads neighbours share a
  // head.
  std::optional<int64_t> total_kv_heads;
  // The target layers this side answers for: it has all their buffers. None: all layers.
  std::optional<IndexRange> layers;
  // Token t is held by rank t / interleave % size of a decode-context-parallel group.
  int64_t dcp_rank = 0;
  int64_t dcp_size = 1;
  int64_t dcp_interleave = 1;
  // Page l of a pool that shard_size ranks stripe is page l / shard_size of rank l % shard_size.
  // Lists of pages are those of the group, the same for each of its ranks.
  int64_t shard_rank = 0;
  int64_t shard_size = 1;

  bool operator==(const KVPlacement&) const = default;
};

/// The buffers of one side of a transfer. A value; addresses are never followed.
class KVLayout {
 public:
  /// Throws std::invalid_argument for ranks and sizes that contradict each other, two entries of
  /// the same layer, kind and draft flag, entries outside `layers`, entries whose bytes are no
  /// whole number of pages or wrap past 2^64, elided entries other than index keys and states
  /// without bytes, HND entries without token rows or a known number of heads, and token rows with
  /// a layout_tag.
  KVLayout(std::vector<KVEntry> entries, const KVPlacement& placement);

  std::span<const KVEntry> entries() const { return entries_; }
  const KVPlacement& placement() const { return placement_; }
  /// The entry of the same layer, kind and draft flag, or nullptr.
  const KVEntry* find(const KVEntry& like) const;
  bool has_draft() const;
  /// Returns the heads, out of total_heads() of a kind, that this side has. index_k and state have
  /// one head, scales the heads of what they scale.
  IndexRange heads(KVKind kind) const;
  int64_t total_heads(KVKind kind) const;
  /// Count of ranks that hold the same heads, and the place of this one among them.
  int64_t num_replicas(KVKind kind) const;
  int64_t replica(KVKind kind) const { return placement_.tp_rank % num_replicas(kind); }
  /// Whether heads come before tokens in pages of an entry, and the two orders differ.
  bool heads_first(const KVEntry& entry) const {
    return entry.kv_layout == KVAxisOrder::hnd && placement_.page_size > 1 &&
           heads(entry.kind).size() > 1;
  }
  /// Two entries that share memory, if any do. Entries with pages between each other's pages must
  /// lie apart modulo the divisor of all their strides.
  std::optional<std::pair<const KVEntry*, const KVEntry*>> overlap() const;
  bool answers_for(const KVEntry& entry) const {
    return entry.is_draft || !placement_.layers || placement_.layers->contains(entry.layer_id);
  }

  bool operator==(const KVLayout& other) const {
    return placement_ == other.placement_ && entries_ == other.entries_;
  }

 private:
  KVPlacement placement_;
  std::vector<KVEntry> entries_;
  std::vector<uint32_t> sorted_;  // positions of entries_, by draft flag, layer and kind
  std::optional<std::pair<uint32_t, uint32_t>> overlap_;
};

}  // namespace cpattn
