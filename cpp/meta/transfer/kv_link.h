// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "cpattn/transfer/kv_transfer.h"
#include "meta/transfer/kv_pairs.h"
#include "meta/transfer/kv_runs.h"

namespace cpattn {

/// Specification of what a source sends to a destination; it refers to their entries and pages.
struct KVLinkSpec {
  KVPageList from;
  KVPageList to;
  std::vector<KVPair> pairs;
  IndexRange tokens;             // that this context-parallel rank sends
  IndexRange all_tokens;         // that all ranks send
  std::vector<IndexRange> sent;  // of `tokens`, those in pages that the source has
};

/// Makes the link of one source and one destination; arguments and errors are those of
/// plan_kv_transfer.
KVLinkSpec specify_link(
    const KVLayout& src,
    const KVLayout& dst,
    std::span<const int64_t> src_pages,
    std::span<const int64_t> dst_pages,
    const KVTransferRange& range
);

TransferPlan plan_link(KVLinkSpec link, const KVLayout& src, const KVLayout& dst);

}  // namespace cpattn
