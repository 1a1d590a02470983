// SPDX-License-Identifier: Apache-2.0
#pragma once

// Rows with fewer dimensions in memory than kernels compute with, which is a multiple of sixteen:
// each row is copied and padded with zeros. Nothing here depends on the instruction set.
#include "kernels/rows/tile-inl.h"

namespace cpattn::kernels {
namespace {

/// Copies a row of stored_bytes bytes, and pads it to `bytes` with zeros.
inline void copy_padded(const void* row, int64_t stored_bytes, int64_t bytes, void* copy) {
  __builtin_memcpy(copy, row, stored_bytes);
  __builtin_memset(static_cast<char*>(copy) + stored_bytes, 0, bytes - stored_bytes);
}

/// Engine::pack_query() of a query that has stored_dim dimensions in memory, if its tile is padded.
template <class Engine, class T>
void pack_padded_query(
    const AttentionTile& tile,
    const T* source,
    int stored_dim,
    int dim,
    typename Engine::Operand* packed
) {
  if (!is_padded(tile) || stored_dim == dim) return Engine::pack_query(source, dim, packed);
  T copy[kMaxHeadDim];
  copy_padded(source, stored_dim * sizeof(T), dim * sizeof(T), copy);
  Engine::pack_query(copy, dim, packed);
}

/// Rows of keys or values of `dim` dimensions, for kernels that read them in place. If memory has
/// fewer dimensions, kernels read padded copies.
class PaddedRows {
 public:
  /// `copies` has room for all rows that are read together.
  PaddedRows(const AttentionTile& tile, int stored_dim, int dim, int element_bytes, char* copies)
      : copies_(is_padded(tile) && stored_dim < dim ? copies : nullptr),
        stored_bytes_(stored_dim * element_bytes),
        bytes_(dim * element_bytes) {}

  /// Returns the i-th of the rows that are read together; memory has it at `row`.
  const char* read(const char* row, int i) const {
    if (copies_ == nullptr) return row;
    char* copy = copies_ + int64_t{i} * bytes_;
    copy_padded(row, stored_bytes_, bytes_, copy);
    return copy;
  }

 private:
  char* const copies_;  // null if memory has all dimensions
  const int stored_bytes_, bytes_;
};

}  // namespace
}  // namespace cpattn::kernels
