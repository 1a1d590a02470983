// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace cpattn {

/// The number of keys that are read of each of num_sequences sequences: the largest keys_of(row) of
/// the rows, or segments, of sequence row.table_row.
template <class Row, class KeysOf>
std::vector<int64_t> keys_per_sequence(
    const std::vector<Row>& rows, int64_t num_sequences, KeysOf keys_of
) {
  std::vector<int64_t> keys(num_sequences, 0);
  for (const Row& row : rows) keys[row.table_row] = std::max(keys[row.table_row], keys_of(row));
  return keys;
}

}  // namespace cpattn
