// SPDX-License-Identifier: Apache-2.0
#include "ops/sparse/slot_rows.h"

#include <algorithm>
#include <numeric>

#include "cpattn/base/check.h"
#include "cpattn/base/page_size.h"
#include "cpattn/base/prefix_sums.h"

namespace cpattn {

SlotRows::SlotRows(
    const char* function, const SlotTable& table, std::span<const int64_t> table_rows
)
    : function_(function), table_(table), table_rows_(table_rows) {
  check_page_size(function, table.page_size);
}

void SlotRows::check_length(int64_t query, int64_t length) const {
  const int64_t width = table_.pages.columns;
  check(
      length <= 0 || (length - 1) / table_.page_size < width, function_,
      ": lengths must be within the page table, ", width, " pages of ", table_.page_size, ", got ",
      length, " at index ", query
  );
}

/// One loop per type of entry.
template <class Entry>
void SlotRows::replace(const Entry* table, int64_t row, int32_t* tokens, int64_t n) const {
  // A table without columns may have no memory, and its rows no address.
  const Entry* entries = table_.pages.columns > 0 ? table + row * table_.pages.row_stride : nullptr;
  const int64_t stride = table_.pages.column_stride;
  const auto width = table_.pages.columns;
  const auto page_size = static_cast<uint32_t>(table_.page_size);  // 32 bits divide faster
  const int64_t num_pages = (int64_t{1} << 31) / page_size;        // whose slots fit int32
  for (int64_t i = 0; i < n; ++i) {
    if (tokens[i] < 0) {
      tokens[i] = -1;
      continue;
    }
    const auto token = static_cast<uint32_t>(tokens[i]);
    const uint32_t column = page_size == 1 ? token : token / page_size;
    check(
        column < width, function_, ": indices must be within the page table, ", width, " pages of ",
        page_size, ", got ", token, " for its row ", row
    );
    const int64_t page = entries[column * stride];
    check(
        page >= 0 && page < num_pages, function_,
        ": entries of the page table must be >= 0 and their slots fit into int32, got ", page,
        " at [", row, ", ", column, "]"
    );
    tokens[i] = static_cast<int32_t>(page * page_size + (token - column * page_size));
  }
}

void SlotRows::replace(int64_t query, int32_t* tokens, int64_t n) const {
  const IndexTable& pages = table_.pages;
  const int64_t row = table_rows_[query];
  if (pages.is_int64) {
    replace(static_cast<const int64_t*>(pages.data), row, tokens, n);
  } else {
    replace(static_cast<const int32_t*>(pages.data), row, tokens, n);
  }
}

std::vector<int64_t> expand_indptr(
    const char* function,
    const char* name,
    std::span<const int64_t> indptr,
    int64_t num_sequences,
    int64_t num_queries
) {
  const auto size = static_cast<int64_t>(indptr.size());
  check(
      size == num_sequences + 1, function, ": ", name,
      " must have one element more than there are ", "sequences, ", num_sequences + 1, ", got ",
      size
  );
  check_prefix_sums(
      function, name, indptr,
      {.leading_zero = true,
       .reaches_total = true,
       .total = num_queries,
       .total_name = "the number of rows"}
  );
  std::vector<int64_t> rows;
  rows.reserve(num_queries);
  for (int64_t s = 0; s < num_sequences; ++s) rows.resize(indptr[s + 1], s);
  return rows;
}

std::vector<int64_t> one_row_each(int64_t num_rows) {
  std::vector<int64_t> rows(num_rows);
  std::iota(rows.begin(), rows.end(), 0);
  return rows;
}

void write_all_indices(int64_t n, int64_t topk, int32_t* out) {
  std::iota(out, out + n, 0);
  std::fill(out + n, out + topk, -1);
}

}  // namespace cpattn
