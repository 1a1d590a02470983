// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cassert>
#include <cstdint>

namespace cpattn {

/// A borrowed two-dimensional table of int32 or int64 indices, such as the block
/// tables of a batch. Strides count elements.
struct IndexTable {
  const void* data = nullptr;
  bool is_int64 = false;
  int64_t rows = 0;
  int64_t columns = 0;
  int64_t row_stride = 0;
  int64_t column_stride = 1;

  int64_t at(int64_t row, int64_t column) const {
    assert(row >= 0 && row < rows && column >= 0 && column < columns);
    const int64_t offset = row * row_stride + column * column_stride;
    return is_int64 ? static_cast<const int64_t*>(data)[offset]
                    : static_cast<const int32_t*>(data)[offset];
  }
};

}  // namespace cpattn
