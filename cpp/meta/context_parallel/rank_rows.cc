// SPDX-License-Identifier: Apache-2.0
#include "cpattn/context_parallel/rank_rows.h"

#include <algorithm>

#include "meta/context_parallel/block_split.h"

namespace cpattn {
namespace {

/// Adds segments to the rows of ranks, one rank after the other.
class RankRowsWriter {
 public:
  explicit RankRowsWriter(const ContextParallelMetadata& metadata) {
    out_.prefix_lens.assign(metadata.prefix_lens.begin(), metadata.prefix_lens.end());
    out_.segment_indptr.assign(1, 0);
  }

  /// Adds every step-th new token of a request from one on.
  void add(int64_t request, int64_t first, int64_t count, int64_t step) {
    if (count <= 0) return;
    out_.rank.push_back(static_cast<int64_t>(out_.segment_indptr.size()) - 1);
    out_.request.push_back(request);
    out_.position.push_back(out_.prefix_lens[request] + first);
    out_.step.push_back(step);
    out_.row.push_back(row_);
    out_.count.push_back(count);
    row_ += count;
  }
  void end_rank() {
    out_.segment_indptr.push_back(static_cast<int64_t>(out_.rank.size()));
    row_ = 0;
  }
  RankRows& rows() { return out_; }

 private:
  RankRows out_;
  int64_t row_ = 0;
};

}  // namespace

int64_t RankRows::num_rows(int64_t of_rank) const {
  const int64_t end = segment_indptr[of_rank + 1];
  return end == segment_indptr[of_rank] ? 0 : row[end - 1] + count[end - 1];
}

std::vector<RankRows::Ints> RankRows::by_request() const {
  std::vector<Ints> segments(prefix_lens.size());
  for (int64_t i = 0; i < num_segments(); ++i) segments[request[i]].push_back(i);
  for (Ints& of_request : segments) {
    std::ranges::sort(of_request, {}, [this](int64_t i) { return position[i]; });
  }
  return segments;
}

RankRows rank_rows(const ContextParallelMetadata& metadata) {
  RankRowsWriter writer(metadata);
  const int64_t size = metadata.cp_size;
  if (metadata.strategy == CpStrategy::interleave) {
    for (int64_t rank = 0; rank < size; ++rank) {
      int64_t begin = 0;
      for (int32_t s = 0; s < metadata.bs; ++s) {
        const int64_t len = metadata.extend_lens[s];
        const int64_t first = (rank - begin % size + size) % size;
        writer.add(s, first, (len - first + size - 1) / size, size);
        begin += len;
      }
      writer.end_rank();
    }
    return std::move(writer.rows());
  }
  with_split(metadata, [&](const auto& split) {
    for (int32_t rank = 0; rank < size; ++rank) {
      for (int32_t half = 0; half < split.halves; ++half) {
        const int32_t block = block_of(split, rank, half);
        for (int32_t s = 0; s < metadata.bs; ++s) {
          writer.add(s, split.before(s, block), split.size(s, block), 1);
        }
      }
      writer.end_rank();
    }
  });
  return std::move(writer.rows());
}

}  // namespace cpattn
