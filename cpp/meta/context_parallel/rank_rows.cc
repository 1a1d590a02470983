// SPDX-License-Identifier: Apache-2.0
#include "cpattn/context_parallel/rank_rows.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "meta/context_parallel/block_split.h"

namespace cpattn {
namespace {

/// Adds segments to the rows of ranks, one rank after the other.
class RankRowsWriter {
 public:
  template <class Lens>
  explicit RankRowsWriter(const Lens& prefix_lens) {
    out_.prefix_lens.assign(prefix_lens.begin(), prefix_lens.end());
    out_.segment_indptr.assign(1, 0);
  }

  /// Adds `count` tokens of a request from a position on.
  void add(int64_t request, int64_t position, int64_t count, int64_t step) {
    if (count <= 0) return;
    out_.rank.push_back(static_cast<int64_t>(out_.segment_indptr.size()) - 1);
    out_.request.push_back(request);
    out_.position.push_back(position);
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

std::vector<uint8_t> RankRows::whole_on_each_rank() const {
  std::vector<uint8_t> whole;
  for (const Ints& segments : by_request()) {
    whole.push_back(segments.size() > 1 && position[segments[0]] == position[segments[1]] ? 1 : 0);
  }
  return whole;
}

RankRows rank_rows(const ContextParallelMetadata& metadata) {
  RankRowsWriter writer(metadata.prefix_lens);
  const int64_t size = metadata.cp_size;
  if (metadata.strategy == CpStrategy::interleave) {
    for (int64_t rank = 0; rank < size; ++rank) {
      int64_t begin = 0;
      for (int32_t s = 0; s < metadata.bs; ++s) {
        const int64_t len = metadata.extend_lens[s];
        const int64_t first = (rank - begin % size + size) % size;
        writer.add(s, metadata.prefix_lens[s] + first, (len - first + size - 1) / size, size);
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
          const int64_t position = metadata.prefix_lens[s] + split.before(s, block);
          writer.add(s, position, split.size(s, block), 1);
        }
      }
      writer.end_rank();
    }
  });
  return std::move(writer.rows());
}

RankRows rank_rows(const PcpLayout& layout) {
  RankRowsWriter writer(layout.prefix_lens);
  std::vector<int64_t> begins(layout.extend_lens.size());
  std::exclusive_scan(
      layout.extend_lens.begin(), layout.extend_lens.end(), begins.begin(), int64_t{0}
  );
  for (int64_t rank = 0; rank < layout.pcp_size; ++rank) {
    for (int64_t i = layout.segment_indptr[rank]; i < layout.segment_indptr[rank + 1]; ++i) {
      const int64_t request = layout.request[i];
      const int64_t new_token = layout.batch_start[i] - begins[request];
      const int64_t count = layout.batch_stop[i] - layout.batch_start[i];
      writer.add(request, layout.prefix_lens[request] + new_token, count, 1);
    }
    writer.end_rank();
  }
  return std::move(writer.rows());
}

RankRows consecutive(const RankRows& rows) {
  RankRowsWriter writer(rows.prefix_lens);
  for (int64_t rank = 0; rank < rows.cp_size(); ++rank) {
    for (int64_t i = rows.segment_indptr[rank]; i < rows.segment_indptr[rank + 1]; ++i) {
      const int64_t pieces = rows.step[i] == 1 ? 1 : rows.count[i];
      for (int64_t piece = 0; piece < pieces; ++piece) {
        writer.add(
            rows.request[i], rows.position[i] + piece * rows.step[i], rows.count[i] / pieces, 1
        );
      }
    }
    writer.end_rank();
  }
  return std::move(writer.rows());
}

}  // namespace cpattn
