// SPDX-License-Identifier: Apache-2.0
#pragma once

// The boundary between ops and the kernels of the indexer.
#include <stdint.h>

namespace cpattn::kernels {

/// Key j of a sequence is row j % page_size of page pages[j / page_size]; pages and rows are
/// page_bytes and row_bytes apart. Its score is multiplied by its scale.
struct IndexerKeys {
  const void* data;
  int64_t page_bytes, row_bytes;
  const void* scales;  // float32, in the same pages, at strides of their own; null: all 1
  int64_t scale_page_bytes, scale_row_bytes;
  const int32_t* pages;
  int64_t page_size;
};

/// One query, and the places for its scores of keys [begin, end) or its best keys.
struct IndexerQuery {
  const void* q;         // num_heads rows of `dim`, head_stride elements apart
  const float* weights;  // one per head
  int64_t begin, end;
  /// Gets the scores, beginning with that of key `begin`. If null, the best keys are selected
  /// instead.
  float* logits = nullptr;
  /// Gets IndexerTile::topk indices relative to `origin`: of the keys with the largest
  /// scores, or of all and then -1 if there are no more.
  int32_t* indices = nullptr;
  int64_t origin = 0;
  /// Gets the scores of these indices too, if not null; -inf beside -1.
  float* values = nullptr;
};

/// Queries that read the same sequence: the unit of work.
struct IndexerTile {
  const IndexerQuery* queries;
  int32_t num_queries;
  int32_t num_heads;
  int32_t dim;  // a multiple of 16, at most kMaxIndexerDim
  int64_t head_stride;
  IndexerKeys keys;

  int32_t topk = 0;  // of every query, unless it wants logits
  bool sorted = true;

  bool (*should_stop)(void* context);  // as in AttentionTile
  void* stop_context;
};

/// Sums of this many int8 products stay below 2^24, so they are exact in float32.
constexpr int32_t kMaxIndexerDim = 256;

/// Element types of queries and keys, as indices into the tables.
enum IndexerType { kIndexFloat32, kIndexBfloat16, kIndexFloat8, kIndexInt8, kNumIndexerTypes };

struct IndexerKernel {
  /// Scratch for tiles of up to num_queries queries; topk 0: for logits.
  int64_t (*scratch_bytes)(int32_t num_queries, int32_t num_heads, int32_t dim, int32_t topk);
  /// Returns false if should_stop() ended it early. `scratch` is 64-byte aligned.
  bool (*run)(const IndexerTile* tile, void* scratch);
};

/// The results of one query over parts of its keys: `topk` ascending indices of each part, and
/// their values.
struct IndexerParts {
  const int32_t* indices;
  const float* values;
  int64_t num_parts;
  int64_t num_keys;  // of all parts
  int64_t stride;    // from one part to the next, a multiple of 16
  int32_t topk;
  bool sorted;
  int32_t* out_indices;
  float* out_values;  // may be null
};

struct IndexerKernels {
  IndexerKernel of_type[kNumIndexerTypes];
  /// The best of all parts, in scratch of merge_scratch_bytes(topk).
  int64_t (*merge_scratch_bytes)(int32_t topk);
  void (*merge)(const IndexerParts* parts, void* scratch);
};

}  // namespace cpattn::kernels
