// SPDX-License-Identifier: Apache-2.0
#pragma once

// Addresses of the rows of keys and values. Nothing here depends on the instruction set.
#include "kernels/rows/visibility-inl.h"

namespace cpattn::kernels {
namespace {

/// Rows in pages, with the bytes from one page or row to the next.
struct PagedBytes {
  const void* data;
  int64_t page_bytes, row_bytes;
};

/// Addresses of the rows [begin, begin + n) of a sequence.
inline void locate_rows(
    const PagedBytes& source,
    const int32_t* pages,
    int64_t page_size,
    int64_t begin,
    int n,
    const char** rows
) {
  int64_t page = begin / page_size;
  int64_t offset = begin % page_size;
  const char* data = static_cast<const char*>(source.data);
  for (int i = 0; i < n; ++page, offset = 0) {
    const char* base = data + pages[page] * source.page_bytes;
    for (; i < n && offset < page_size; ++i, ++offset) rows[i] = base + offset * source.row_bytes;
  }
}

/// Addresses of the rows of keys [begin, begin + n) of a tile. Decode is 2 % slower if this loop
/// shares its code with the one above.
inline void locate_rows(
    const PagedRows& source,
    const AttentionTile& tile,
    int64_t begin,
    int n,
    int element_bytes,
    const char** rows
) {
  int64_t page = begin / tile.page_size;
  int64_t offset = begin % tile.page_size;
  const char* data = static_cast<const char*>(source.data);
  for (int i = 0; i < n; ++page, offset = 0) {
    const char* base = data + tile.pages[page] * source.page_stride * element_bytes;
    for (; i < n && offset < tile.page_size; ++i, ++offset) {
      rows[i] = base + offset * source.row_stride * element_bytes;
    }
  }
}

/// No token sees keys [from, to): they may hold anything, NaN too, so a visible key stands in for
/// them.
inline void stand_in(const char** rows, int from, int to, int visible) {
  for (int i = from; i < to; ++i) rows[i] = rows[visible];
}

/// locate_rows() of n keys, the first `hidden` of which no token sees.
inline void locate_visible_rows(
    const PagedRows& source,
    const AttentionTile& tile,
    int64_t begin,
    int n,
    int hidden,
    int element_bytes,
    const char** rows
) {
  locate_rows(source, tile, begin + hidden, n - hidden, element_bytes, rows + hidden);
  stand_in(rows, 0, hidden, hidden);
}

/// The rows of another KV head.
inline PagedRows rows_of_head(PagedRows source, int head, int element_bytes) {
  source.data = static_cast<const char*>(source.data) + head * source.head_stride * element_bytes;
  return source;
}

/// Prefetches a row to the L2 (kLocality 2) or the L1 (3). Always inlined: GCC drops calls of
/// functions that only prefetch.
template <int kLocality>
[[gnu::always_inline]] inline void fetch_row(const void* row, int64_t bytes) {
  const char* line = static_cast<const char*>(row);
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(line + i, 0, kLocality);
}

}  // namespace
}  // namespace cpattn::kernels
