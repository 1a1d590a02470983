// SPDX-License-Identifier: Apache-2.0
#pragma once

// What the attention loop on AMX tiles works on: its buffers, the steps of a
// block, and the vector work that is handed out in slices between products.
#include "kernels/amx_products-inl.h"
#include "kernels/amx_softmax-inl.h"
#include "kernels/attention-inl.h"

namespace cpattn::kernels {
namespace {

/// Keys packed at a time: one block, or as many as fit a quarter of a 2 MB L2
/// together with the next ones, which are fetched to it meanwhile. Q and O of
/// 1500 rows of head dimension 128 take half of it.
template <class T>
int64_t packed_keys(int depth, int v_head_dim) {
  constexpr int64_t kBytes = 512 * 1024;
  constexpr int64_t kMaxBlocks = kMaxPackedKeys / kAmxBlockKeys<T>;
  constexpr int64_t kPackedAndNext = (TileFormat<T>::kParts + 1) * sizeof(T);
  const int64_t block_bytes = kPackedAndNext * kAmxBlockKeys<T> * (int64_t{depth} + v_head_dim);
  return kAmxBlockKeys<T> * larger(1, smaller(kMaxBlocks, kBytes / block_bytes));
}

/// 32 rows of a group against 32 keys of a block.
struct Step {
  int row;          // the first; a multiple of 32
  int count;        // of rows
  int chunk;        // which of the packed keys
  int first_chunk;  // that the group sees of the block
  int end_chunk;    // one past the last
  bool last;        // of the group in the block

  bool first() const { return chunk == first_chunk && row % kGroupRows == 0; }
};

/// The rows of a step on their way through softmax.
template <class T>
struct StepRows {
  SoftmaxGroup<T> softmax;
  const float* scores;
  const Step& step;
  int next = 0;

  void take(int n) {
    const int end = static_cast<int>(smaller(next + n, step.count));
    softmax.add_scores(step.row % kGroupRows, step.chunk, scores, next, end);
    next = end;
  }

  void take_rest() {
    for (; next < step.count; keep_tiles_awake()) take(8);
  }
};

/// Sixteen columns of P V on their way to O, [row][16] both.
struct PendingRows {
  const float* product;
  float* output;
  int count;

  void take(int n) {
    for (; n > 0 && count > 0; --n, --count, product += kLanes, output += kLanes) {
      store(output, add(load(output), load(product)));
    }
  }
};

/// Where the keys and values are that are packed together.
template <class T>
class SourceRows {
 public:
  explicit SourceRows(const AttentionTile& tile) : tile_(tile) {}

  /// Keys [first, first + n). The first `hidden` of them no token sees: they may
  /// hold anything, NaN too, so a visible one stands in for them.
  void locate(int64_t first, int n, int hidden) {
    first_ = first;
    count_ = n;
    fetched_ = hidden;
    const auto locate = [&](const PagedRows& source, const char** rows) {
      locate_rows(source, tile_, first + hidden, n - hidden, sizeof(T), rows + hidden);
      for (int i = 0; i < hidden; ++i) rows[i] = rows[hidden];
    };
    locate(tile_.k, k);
    if (tile_.rope_dim > 0) locate(tile_.k_rope, k_rope);
    locate(tile_.v, v);
  }

  int64_t first() const { return first_; }
  int count() const { return count_; }

  /// Brings the next n keys and their values to L2. They are too far apart in a
  /// cache of many heads for hardware to do so, and packing would wait for them.
  void fetch(int n) {
    for (; n > 0 && fetched_ < count_; --n, ++fetched_) {
      fetch_row(k[fetched_], tile_.head_dim);
      if (tile_.rope_dim > 0) fetch_row(k_rope[fetched_], tile_.rope_dim);
      fetch_row(v[fetched_], tile_.v_head_dim);
    }
  }

  const char* k[kMaxPackedKeys];
  const char* k_rope[kMaxPackedKeys];
  const char* v[kMaxPackedKeys];

 private:
  static void fetch_row(const char* row, int dim) {
    for (int byte = 0; byte < dim * static_cast<int>(sizeof(T)); byte += 64)
      _mm_prefetch(row + byte, _MM_HINT_T1);
  }

  const AttentionTile& tile_;
  int64_t first_ = 0;
  int count_ = 0;
  int fetched_ = 0;
};

/// Buffers of one tile of work; rows are padded to whole groups. They take at most
/// 640 KB and, a row, what Q and O do and less than 100 bytes: 0.9 KB for head
/// dimension 128 in bfloat16.
template <class T>
struct AmxWorkspace {
  Bfloat16* queries;        // [rows / 16][part][depth / 32][16][32]
  Bfloat16* keys;           // [packed / 16][part][depth / 32][16][16][2]
  Bfloat16* values;         // [block][v_head_dim / 16][chunks][part][16][16][2]
  Bfloat16* probabilities;  // [chunks][part][64][32]
  T* zeros;                 // [v_head_dim]
  float* scores;            // [2 steps][2 row tiles][2 key tiles][16][16]
  float* product;           // [64][16]
  float* output;            // [groups][v_head_dim / 16][64][16]
  float* sums;              // [rows][16]
  float* references;        // [rows]
  Step* steps;              // of the packed keys
  int64_t packed;           // keys at a time
  int64_t bytes;

  AmxWorkspace(char* base, int64_t rows, int depth, int v_head_dim) {
    constexpr int kParts = TileFormat<T>::kParts;
    packed = packed_keys<T>(depth, v_head_dim);
    const int64_t padded = round_up(static_cast<int>(rows), kGroupRows);
    Carver carver{base};
    carver.take(queries, padded * depth * kParts);
    carver.take(keys, packed * depth * kParts);
    carver.take(values, packed * v_head_dim * kParts);
    carver.take(probabilities, int64_t{kAmxBlockKeys<T>} * kGroupRows * kParts);
    carver.take(zeros, v_head_dim);
    carver.take(scores, 2 * 4 * kTileFloats);
    carver.take(product, 4 * kTileFloats);
    carver.take(output, padded * v_head_dim);
    carver.take(sums, padded * kLanes);
    carver.take(references, padded);
    carver.take(steps, padded / kScoreRows * packed / kTileDepth);
    bytes = carver.used;
  }
};

}  // namespace
}  // namespace cpattn::kernels
