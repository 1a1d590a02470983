// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "cpattn/base/index_table.h"

namespace cpattn {

/// The pages of every sequence. Row r has page_ids[indptr[r] .. indptr[r + 1]).
struct PageTable {
  std::vector<int64_t> indptr = {0};
  std::vector<int32_t> page_ids;
  int64_t num_rows() const { return static_cast<int64_t>(indptr.size()) - 1; }
  bool operator==(const PageTable&) const = default;
};

/// Reads block tables. Row r has at least ceil(kv_lens[r] / page_size) page ids, which are checked
/// against num_pages; later entries are never read. Throws std::invalid_argument naming the
/// sequence, the position and the value.
PageTable page_table_from_blocks(
    const char* function,
    const IndexTable& block_tables,
    std::span<const int64_t> kv_lens,
    int64_t page_size,
    int64_t num_pages
);

/// The CSR form of FlashInfer: kv_indices[kv_indptr[r] .. kv_indptr[r + 1]) are
/// the pages of sequence r and last_page_len[r], in [1, page_size], is the number of tokens on its
/// last page (ignored without pages). Writes the number of keys of each sequence to kv_lens. Throws
/// std::invalid_argument for offsets, pages and lengths that do not fit.
PageTable page_table_from_csr(
    const char* function,
    std::span<const int64_t> kv_indptr,
    std::span<const int64_t> kv_indices,
    std::span<const int64_t> last_page_len,
    int64_t page_size,
    int64_t num_pages,
    std::vector<int64_t>& kv_lens
);

}  // namespace cpattn
