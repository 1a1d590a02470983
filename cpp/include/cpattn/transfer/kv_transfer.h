// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "cpattn/transfer/kv_layout.h"
#include "cpattn/transfer/transfer_plan.h"

namespace cpattn {

/// Division of the sending among the ranks of a context-parallel group, each of which has all KV.
enum class CpShare { pages, layers };

/// The tokens of one sequence to send, and the starts of each side's list of pages. A start is the
/// token in row 0 of the first page, the first of a page. Tokens are counted in the sequence, even
/// if a destination holds only those of its DCP rank.
struct KVTransferRange {
  int64_t src_start = 0;
  int64_t dst_start = 0;
  std::optional<int64_t> first_token;  // none: the first that both lists hold
  std::optional<int64_t> num_tokens;   // none: all up to the token at which both lists end
  int64_t cp_rank = 0;
  int64_t cp_size = 1;
  CpShare cp_share = CpShare::pages;
};

/// Plans the writes of `src` after which `dst` holds these tokens. Entries are paired by layer,
/// kind and draft flag:
///
/// - Target layers that both sides answer for must have the same kinds on both. Other layers
///   belong to other links and are left out. Draft layers are sent if both sides have any; they
///   must then be the same on both.
/// - Entries that either side elided are paired, and nothing is sent for them.
/// - Heads of K and V that both sides hold are sent, by one of the ranks that hold them: replica
///   dst.tp_rank modulo the number of replicas.
/// - Whole pages are sent, also the last one, if both sides have pages of one size, of the same
///   heads in one order, and the tokens begin and are interleaved at pages. Otherwise rows of just
///   these tokens are sent, which is an error for entries without token rows.
///
/// Blocks are entry-major in the order of src's entries, of the least possible number of runs,
/// ascending in the destination. Throws std::invalid_argument, naming side, kind and layer, for
/// sides that do not fit together: a missing entry, other bytes for each token and head, pages
/// outside their buffer, a destination page in two places of the sequence, even if this link does
/// not send them, destination buffers that overlap.
TransferPlan plan_kv_transfer(
    const KVLayout& src,
    const KVLayout& dst,
    std::span<const int64_t> src_pages,
    std::span<const int64_t> dst_pages,
    const KVTransferRange& range
);

/// A process of one side, and its pages of the sequence.
struct KVPeer {
  const KVLayout* layout = nullptr;
  std::span<const int64_t> pages;
  int64_t cp_rank = 0;  // of a source
};

struct KVLink {
  std::size_t source = 0;
  std::size_t destination = 0;
  TransferPlan plan;
};

/// The plans of all pairs of a source and a destination that have anything to send, by source.
/// Together they write every head and token of every entry of every destination exactly once (of
/// draft entries, if any source has some), and every target entry of a source has a destination;
/// otherwise throws std::invalid_argument, which names peers, entry, heads and tokens.
/// range.cp_rank is not read: every source has its own.
std::vector<KVLink> plan_kv_links(
    std::span<const KVPeer> sources,
    std::span<const KVPeer> destinations,
    const KVTransferRange& range
);

}  // namespace cpattn
