// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "cpattn/sparse/topk.h"

namespace cpattn {

/// The rows of a slot table that belong to query rows, checked.
class SlotRows {
 public:
  /// `table_rows` [number of queries]. Throws std::invalid_argument in the name of `function`
  /// unless page_size >= 1 and the rows exist.
  SlotRows(const char* function, const SlotTable& table, std::span<const int64_t> table_rows);

  /// Checks that tokens [0, length) of a query's sequence are within the table.
  void check_length(int64_t query, int64_t length) const;

  /// Replaces tokens [n] of the sequence of a query by their slots; those < 0 by -1.
  /// Throws std::invalid_argument for a token beyond the table, an entry < 0 and a slot
  /// beyond int32.
  void replace(int64_t query, int32_t* tokens, int64_t n) const;

 private:
  template <class Entry>
  void replace(const Entry* table, int64_t row, int32_t* tokens, int64_t n) const;

  const char* function_;
  SlotTable table_;
  std::span<const int64_t> table_rows_;
};

/// Returns for each of num_queries rows the s with indptr[s] <= row < indptr[s + 1]. Checks that
/// indptr [num_sequences + 1] rises from 0 to num_queries.
std::vector<int64_t> expand_indptr(
    const char* function,
    const char* name,
    std::span<const int64_t> indptr,
    int64_t num_sequences,
    int64_t num_queries
);

/// Returns 0, 1, ..., num_rows - 1.
std::vector<int64_t> one_row_each(int64_t num_rows);

/// Writes 0, 1, ..., n - 1, then -1 up to topk.
void write_all_indices(int64_t n, int64_t topk, int32_t* out);

}  // namespace cpattn
