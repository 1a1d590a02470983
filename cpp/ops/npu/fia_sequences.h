// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "cpattn/npu/fia.h"
#include "ops/npu/fia_layout.h"

namespace cpattn::fia {

/// The beginnings and lengths of the sequences of the batch.
struct Sequences {
  std::vector<int64_t> q_begins, q_lens, kv_begins, kv_lens;
  int64_t max_kv_len = 0;  // S2; with blocks the longest of kv_lens
  int64_t size() const { return static_cast<int64_t>(q_lens.size()); }
};

/// Reads actual_seq_lengths and actual_seq_lengths_kv of a query with elements. In packed layouts
/// both are running sums, except lengths of paged keys; in other layouts lengths, one for all or
/// one for each sequence, by default those of the tensors.
Sequences read_sequences(
    const FiaArguments& arguments,
    const Layout& layout,
    const TensorView& query,  // as [B, S, N, D]
    const PagedCache& key
);

/// The pages of the keys of each sequence: the checked block_table, or one page each.
PageTable read_pages(
    const FiaArguments& arguments,
    const Layout& layout,
    const Sequences& sequences,
    const PagedCache& key
);

}  // namespace cpattn::fia
