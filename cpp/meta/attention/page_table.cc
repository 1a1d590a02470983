// SPDX-License-Identifier: Apache-2.0
#include "cpattn/attention/page_table.h"

#include "cpattn/base/check.h"
#include "cpattn/base/page_size.h"
#include "cpattn/base/prefix_sums.h"

namespace cpattn {
namespace {

int32_t checked_page(
    const char* function, int64_t page, int64_t num_pages, int64_t sequence, int64_t position
) {
  check(
      page >= 0 && page < num_pages, function, ": page ids must be in [0, ", num_pages, "), got ",
      page, " at position ", position, " of sequence ", sequence
  );
  return static_cast<int32_t>(page);
}

void check_pages(const char* function, int64_t page_size, int64_t num_pages) {
  check_page_size(function, page_size);
  check(
      num_pages >= 0 && num_pages <= INT32_MAX, function, ": num_pages must be in [0, 2^31), got ",
      num_pages
  );
}

}  // namespace

PageTable page_table_from_blocks(
    const char* function,
    const IndexTable& block_tables,
    std::span<const int64_t> kv_lens,
    int64_t page_size,
    int64_t num_pages
) {
  check_pages(function, page_size, num_pages);
  const auto sequences = static_cast<int64_t>(kv_lens.size());
  check(
      block_tables.rows == sequences, function, ": block_tables must have one row per sequence (",
      sequences, "), got ", block_tables.rows,
      block_tables.rows + 1 == sequences ? "; lengths must not be cumulative" : ""
  );
  PageTable table;
  table.indptr.reserve(kv_lens.size() + 1);
  for (int64_t row = 0; row < sequences; ++row) {
    const int64_t needed = (kv_lens[row] + page_size - 1) / page_size;
    check(
        needed <= block_tables.columns, function, ": block_tables must have at least ", needed,
        " columns for sequence ", row, " (kv_len ", kv_lens[row], ", page_size ", page_size,
        "), got ", block_tables.columns
    );
    for (int64_t i = 0; i < needed; ++i) {
      table.page_ids.push_back(checked_page(function, block_tables.at(row, i), num_pages, row, i));
    }
    table.indptr.push_back(static_cast<int64_t>(table.page_ids.size()));
  }
  return table;
}

PageTable page_table_from_csr(
    const char* function,
    std::span<const int64_t> kv_indptr,
    std::span<const int64_t> kv_indices,
    std::span<const int64_t> last_page_len,
    int64_t page_size,
    int64_t num_pages,
    std::vector<int64_t>& kv_lens
) {
  check_pages(function, page_size, num_pages);
  check_prefix_sums(
      function, "kv_indptr", kv_indptr,
      {.leading_zero = true,
       .total = static_cast<int64_t>(kv_indices.size()),
       .total_name = "the length of kv_indices"}
  );
  check(
      last_page_len.size() + 1 == kv_indptr.size(), function,
      ": last_page_len must have one entry per sequence (", kv_indptr.size() - 1, "), got ",
      last_page_len.size()
  );
  PageTable table;
  kv_lens.clear();
  for (std::size_t row = 0; row + 1 < kv_indptr.size(); ++row) {
    const int64_t pages = kv_indptr[row + 1] - kv_indptr[row];
    check(
        pages == 0 || (last_page_len[row] >= 1 && last_page_len[row] <= page_size), function,
        ": last_page_len must be in [1, ", page_size, "], got ", last_page_len[row], " at index ",
        row
    );
    kv_lens.push_back(pages == 0 ? 0 : (pages - 1) * page_size + last_page_len[row]);
    for (int64_t i = 0; i < pages; ++i) {
      const int64_t page = kv_indices[kv_indptr[row] + i];
      table.page_ids.push_back(
          checked_page(function, page, num_pages, static_cast<int64_t>(row), i)
      );
    }
    table.indptr.push_back(static_cast<int64_t>(table.page_ids.size()));
  }
  return table;
}

}  // namespace cpattn
