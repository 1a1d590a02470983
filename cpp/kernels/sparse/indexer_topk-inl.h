// SPDX-License-Identifier: Apache-2.0
#pragma once

// The best keys of every query of a tile, collected while scores are computed. Needs
// the vector layer included first.
#include "kernels/boundary/indexer_kernel.h"
#include "kernels/sparse/topk-inl.h"

namespace cpattn::kernels {
namespace {

inline int64_t align_bytes(int64_t bytes) { return (bytes + 63) / 64 * 64; }

/// Larger than streams need: scores come in small pieces, and shrinking a buffer takes longer than
/// filling it.
inline int64_t stream_capacity(int32_t topk) { return 2 * topk_capacity(topk); }

/// Bytes of the two buffers of a stream.
inline int64_t stream_bytes(int32_t topk) { return align_bytes(stream_capacity(topk) * 8); }

inline TopkStream make_stream(char* buffers, int32_t topk) {
  const auto capacity = static_cast<int32_t>(stream_capacity(topk));
  auto* scores = reinterpret_cast<float*>(buffers);
  return {
      .scores = scores,
      .indices = reinterpret_cast<int32_t*>(scores + capacity),
      .capacity = capacity,
      .k = topk,
  };
}

/// Takes scores with their indices, which exceed those of earlier calls and ascend. Scores and
/// indices are readable up to a multiple of kLanes.
inline void append_entries(TopkStream& stream, const float* scores, const int32_t* indices, int n) {
  for (int i = 0; i < n; i += kLanes) {
    if (stream.count > stream.capacity - kLanes) topk_shrink(stream);
    const Vector entries = load(scores + i);
    uint32_t bits = stream.admits_all ? ~0U : greater(entries, splat(stream.threshold));
    bits &= n - i < kLanes ? (1U << (n - i)) - 1 : ~0U >> (32 - kLanes);
    store_compressed(stream.scores + stream.count, bits, entries);
    store_compressed(stream.indices + stream.count, bits, load(indices + i));
    stream.count += __builtin_popcount(bits);
  }
}

/// Ends a stream; values may be null. `scratch`: topk_sort_bytes.
inline void finish_stream(
    TopkStream& stream, bool sorted, int32_t* indices, float* values, char* scratch
) {
  topk_finish(stream, sorted, indices, scratch);
  if (values == nullptr) return;
  for (int i = 0; i < stream.count; ++i) {
    // Entries ascend by index: indices[i] is at i unless they were sorted.
    int begin = sorted ? 0 : i;
    for (int end = stream.count; begin + 1 < end && stream.indices[begin] != indices[i];) {
      const int middle = begin + (end - begin) / 2;
      (stream.indices[middle] <= indices[i] ? begin : end) = middle;
    }
    values[i] = stream.scores[begin];
  }
  for (int i = stream.count; i < stream.k; ++i) values[i] = -__builtin_inff();
}

/// The streams of a tile's queries; none if it has no topk.
class QueryStreams {
 public:
  static int64_t bytes(int32_t num_queries, int32_t topk) {
    if (topk == 0) return 0;
    return align_bytes(num_queries * static_cast<int64_t>(sizeof(TopkStream))) +
           num_queries * stream_bytes(topk) + align_bytes(topk_sort_bytes(topk));
  }

  QueryStreams(const IndexerTile& tile, char* scratch)
      : tile_(tile), streams_(reinterpret_cast<TopkStream*>(scratch)) {
    if (tile.topk == 0) return;
    scratch += align_bytes(tile.num_queries * static_cast<int64_t>(sizeof(TopkStream)));
    for (int i = 0; i < tile.num_queries; ++i, scratch += stream_bytes(tile.topk)) {
      streams_[i] = make_stream(scratch, tile.topk);
    }
    sort_scratch_ = scratch;
  }

  /// Scores of keys first_key, first_key + 1, ...
  void push(int i, const float* scores, int n, int64_t first_key) {
    topk_push(streams_[i], scores, n, static_cast<int32_t>(first_key - tile_.queries[i].origin));
  }

  void finish(int i) {
    const IndexerQuery& query = tile_.queries[i];
    finish_stream(streams_[i], tile_.sorted, query.indices, query.values, sort_scratch_);
  }

 private:
  const IndexerTile& tile_;
  TopkStream* const streams_;
  char* sort_scratch_ = nullptr;
};

inline int64_t merge_scratch_bytes(int32_t topk) {
  return stream_bytes(topk) + topk_sort_bytes(topk);
}

inline void merge_indexer_parts(const IndexerParts* parts, void* scratch) {
  auto* buffers = static_cast<char*>(scratch);
  TopkStream stream = make_stream(buffers, parts->topk);
  for (int64_t part = 0; part < parts->num_parts; ++part) {
    const int32_t* indices = parts->indices + part * parts->stride;
    int n = 0;
    while (n < parts->topk && indices[n] >= 0) ++n;
    append_entries(stream, parts->values + part * parts->stride, indices, n);
  }
  // A part may have dropped keys while others have none.
  stream.admits_all = parts->num_keys <= parts->topk;
  finish_stream(
      stream, parts->sorted, parts->out_indices, parts->out_values,
      buffers + stream_bytes(parts->topk)
  );
}

}  // namespace
}  // namespace cpattn::kernels
