// SPDX-License-Identifier: Apache-2.0
#pragma once

// Which keys a token sees and where their rows are. Nothing here depends on the instruction set.
#include "kernels/attention_kernel.h"

namespace cpattn::kernels {
namespace {

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

inline void mark(const AttentionTile& tile, KernelScope scope, int64_t flops = 0) {
  if (tile.mark != nullptr) tile.mark(tile.mark_context, scope, flops);
}

/// Half-open range of keys.
struct KeyRange {
  int64_t begin, end;
};

inline KeyRange visible_keys(const AttentionTile& tile, int64_t token) {
  const int64_t position = tile.first_position + token * tile.position_step;
  return {
      larger(tile.kv_begin, position - tile.left),
      larger(0, smaller(tile.kv_len, position + tile.right + 1))
  };
}

inline bool sees(const AttentionTile& tile, int64_t token, int64_t key) {
  const KeyRange range = visible_keys(tile, token);
  if (key < range.begin || key >= range.end) return false;
  return tile.mask == nullptr ||
         (tile.mask[token * tile.mask_stride + key / 8] >> key % 8 & 1) != 0;
}

/// 32 bits of a token's mask, those of keys [key, key + 32); key is a multiple of 32.
inline uint32_t mask_word(const AttentionTile& tile, int64_t token, int64_t key) {
  uint32_t word;
  __builtin_memcpy(&word, tile.mask + token * tile.mask_stride + key / 8, sizeof word);
  return word;
}

/// Whether the mask shows any of keys [key, key + 32) to any of tokens [first, end).
inline bool mask_shows(const AttentionTile& tile, int64_t first, int64_t end, int64_t key) {
  for (int64_t token = first; token < end; ++token) {
    if (mask_word(tile, token, key) != 0) return true;
  }
  return false;
}

/// Addresses of the rows of keys [begin, begin + n).
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

/// Starts to bring a row of `bytes` to L2. Always inlined: GCC drops calls of
/// functions that only prefetch.
[[gnu::always_inline]] inline void fetch_row(const void* row, int bytes) {
  for (int i = 0; i < bytes; i += 64) __builtin_prefetch(static_cast<const char*>(row) + i, 0, 2);
}

}  // namespace
}  // namespace cpattn::kernels
