// SPDX-License-Identifier: Apache-2.0
#pragma once

// The keys that a token sees, and their rows. Nothing here depends on the instruction set.
#include "kernels/attention/attention_kernel.h"

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

/// Whether the mask, if there is one, shows any of keys [key, key + n) to any of
/// tokens [token, end_token). key is a multiple of 32, and whole words count.
inline bool any_shown(
    const AttentionTile& tile, int64_t token, int64_t end_token, int64_t key, int n
) {
  if (tile.mask == nullptr) return true;
  for (; token < end_token; ++token) {
    for (int i = 0; i < n; i += 32) {
      if (mask_word(tile, token, key + i) != 0) return true;
    }
  }
  return false;
}

/// Narrows the range of keys first + begin to first + end, multiples of 32, to what
/// the mask does not hide from all of the tokens.
inline void drop_hidden(
    const AttentionTile& tile, int64_t token, int64_t end_token, int64_t first, int& begin, int& end
) {
  while (begin < end && !any_shown(tile, token, end_token, first + begin, 32)) begin += 32;
  while (begin < end && !any_shown(tile, token, end_token, first + end - 32, 32)) end -= 32;
}

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

/// Addresses of the rows of keys [begin, begin + n) of a tile. Decode is 2 % slower where this loop
/// is shared with the one above.
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

/// Bytes of an element of K and V in memory, where elements are of type T.
template <class T>
int element_bytes(const AttentionTile& tile) {
  return tile.expand_codes != nullptr ? 1 : static_cast<int>(sizeof(T));
}

/// Bytes of a row of K in memory.
template <class T>
int64_t stored_key_bytes(const AttentionTile& tile) {
  return tile.expand != nullptr ? tile.stored_bytes : tile.nope_dim * element_bytes<T>(tile);
}

/// The rows of another KV head.
inline PagedRows rows_of_head(PagedRows source, int head, int element_bytes) {
  source.data = static_cast<const char*>(source.data) + head * source.head_stride * element_bytes;
  return source;
}

/// The factor of q . k for a KV head.
inline float scale_of_head(const AttentionTile& tile, int64_t head) {
  return tile.k_head_factors == nullptr ? tile.scale : tile.scale * tile.k_head_factors[head];
}

/// The factor of V for a KV head.
inline float v_factor_of_head(const AttentionTile& tile, int64_t head) {
  return tile.v_head_factors == nullptr ? tile.v_factor : tile.v_factor * tile.v_head_factors[head];
}

/// Starts to bring a row to the L2 (kLocality 2) or the L1 (3). Always inlined: GCC
/// drops calls of functions that only prefetch.
template <int kLocality>
[[gnu::always_inline]] inline void fetch_row(const void* row, int64_t bytes) {
  const char* line = static_cast<const char*>(row);
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(line + i, 0, kLocality);
}

}  // namespace
}  // namespace cpattn::kernels
