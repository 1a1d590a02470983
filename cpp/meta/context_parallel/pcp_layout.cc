// SPDX-License-Identifier: Apache-2.0
#include "cpattn/context_parallel/pcp_layout.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "cpattn/base/check.h"
#include "cpattn/context_parallel/context_parallel.h"

namespace cpattn {
namespace {

using PcpLens = std::span<const int64_t>;

void check_pcp_lens(const char* function, const char* name, PcpLens lens) {
  for (std::size_t s = 0; s < lens.size(); ++s) {
    check(
        lens[s] >= 0 && lens[s] <= INT32_MAX, function, ": ", name,
        " must be >= 0 and fit into int32, got ", lens[s], " at index ", s
    );
  }
}

void check_pcp_size(const char* function, const char* name, int64_t size) {
  check(
      size >= 1 && size <= kMaxCpSize, function, ": ", name, " must be in [1, ", kMaxCpSize,
      "], got ", size
  );
}

void check_pcp_batch(const PcpBatch& batch, const char* function) {
  check_pcp_size(function, "pcp_size", batch.pcp_size);
  check_pcp_size(function, "dcp_size", batch.dcp_size);
  check_pcp_lens(function, "extend_lens", batch.extend_lens);
  check_pcp_lens(function, "prefix_lens", batch.prefix_lens);
  const std::size_t bs = batch.extend_lens.size();
  check(
      batch.prefix_lens.size() == bs, function, ": prefix_lens must have ", bs,
      " values, as extend_lens, got ", batch.prefix_lens.size()
  );
  check(
      !batch.is_prefill || batch.is_prefill->size() == bs, function, ": is_prefill must have ", bs,
      " values, as extend_lens, got ", batch.is_prefill ? batch.is_prefill->size() : 0
  );
  for (std::size_t s = 0; s < bs; ++s) {
    const int64_t len = batch.extend_lens[s] + batch.prefix_lens[s];
    check(
        len <= INT32_MAX, function, ": extend_lens + prefix_lens must fit into int32, got ", len,
        " at index ", s
    );
  }
  const int64_t sum =
      std::accumulate(batch.extend_lens.begin(), batch.extend_lens.end(), int64_t{0});
  check(sum <= INT32_MAX, function, ": the sum of extend_lens must fit into int32, got ", sum);
}

/// Adds segments to an empty layout.
class SegmentWriter {
 public:
  explicit SegmentWriter(PcpLayout& layout) : layout_(layout), base_(layout.extend_lens.size()) {
    std::exclusive_scan(
        layout.extend_lens.begin(), layout.extend_lens.end(), base_.begin(), int64_t{0}
    );
    layout.segment_indptr.assign(1, 0);
  }

  /// Adds tokens [begin, end) of the new ones of a request.
  void add(std::size_t s, int64_t begin, int64_t end) {
    if (begin >= end) return;
    layout_.request.push_back(static_cast<int64_t>(s));
    layout_.batch_start.push_back(base_[s] + begin);
    layout_.batch_stop.push_back(base_[s] + end);
    layout_.rank_start.push_back(row_);
    layout_.rank_stop.push_back(row_ += end - begin);
    layout_.seq_lens.push_back(layout_.prefix_lens[s] + end);
  }

  /// The rank's last segment was added. Returns its number of rows.
  int64_t end_rank() {
    layout_.segment_indptr.push_back(static_cast<int64_t>(layout_.request.size()));
    return std::exchange(row_, 0);
  }

 private:
  PcpLayout& layout_;
  PcpLayout::Ints base_;
  int64_t row_ = 0;
};

/// Calls visit(segment, row) for each segment whose keys and values are written, replicated ones
/// once, with its first padded row.
template <class Visit>
void for_each_written(const PcpLayout& layout, Visit visit) {
  for (int64_t rank = 0; rank < layout.pcp_size; ++rank) {
    for (int64_t i = layout.segment_indptr[rank]; i < layout.segment_indptr[rank + 1]; ++i) {
      if (rank > 0 && layout.replicated[layout.request[i]] != 0) continue;
      visit(i, rank * layout.padded_num_tokens + layout.rank_start[i]);
    }
  }
}

}  // namespace

PcpLayout build_pcp_layout(const PcpBatch& batch, const char* function) {
  check_pcp_batch(batch, function);
  const std::size_t bs = batch.extend_lens.size();
  const int64_t num_chunks = 2 * batch.pcp_size;
  PcpLayout layout{
      .extend_lens = {batch.extend_lens.begin(), batch.extend_lens.end()},
      .prefix_lens = {batch.prefix_lens.begin(), batch.prefix_lens.end()},
      .is_prefill = std::vector<uint8_t>(bs),
      .replicated = std::vector<uint8_t>(bs),
      .pcp_size = batch.pcp_size,
      .dcp_size = batch.dcp_size,
      .shard_decode = batch.shard_decode && batch.dcp_size == 1,
  };
  PcpLayout::Ints chunk(bs), owner(bs, -1);  // for a decode that one rank has
  int64_t num_owned = 0;
  for (std::size_t s = 0; s < bs; ++s) {
    const int64_t len = layout.extend_lens[s];
    layout.num_tokens += len;
    chunk[s] = (len + num_chunks - 1) / num_chunks;
    layout.is_prefill[s] =
        batch.is_prefill ? (*batch.is_prefill)[s] : len != 1 || layout.prefix_lens[s] == 0;
    const bool is_short = batch.dcp_size > 1 && (num_chunks - 1) * chunk[s] >= len;
    if (layout.is_prefill[s] == 0 && layout.shard_decode) {
      if (len > 0) owner[s] = num_owned++ % batch.pcp_size;
    } else {
      layout.replicated[s] = layout.is_prefill[s] == 0 || is_short;
    }
  }
  SegmentWriter writer(layout);
  int64_t most_rows = 0;
  for (int64_t rank = 0; rank < batch.pcp_size; ++rank) {
    for (const bool prefills : {false, true}) {
      for (std::size_t s = 0; s < bs; ++s) {
        if ((layout.is_prefill[s] != 0) != prefills) continue;
        const int64_t len = layout.extend_lens[s];
        if (layout.replicated[s] != 0 || owner[s] == rank) {
          writer.add(s, 0, len);
        } else if (prefills) {
          for (const int64_t i : {rank, num_chunks - 1 - rank}) {
            writer.add(s, i * chunk[s], std::min((i + 1) * chunk[s], len));
          }
        }
      }
    }
    most_rows = std::max(most_rows, writer.end_rank());
  }
  layout.padded_num_tokens = batch.padded_num_tokens.value_or(most_rows);
  check(
      layout.padded_num_tokens >= most_rows && layout.padded_num_tokens <= INT32_MAX, function,
      ": padded_num_tokens must be at least the ", most_rows,
      " rows of a rank, and fit into int32, got ", layout.padded_num_tokens
  );
  return layout;
}

std::vector<int64_t> local_q_indices(const PcpLayout& layout, int64_t rank) {
  std::vector<int64_t> tokens(layout.num_rows(rank));
  for (int64_t i = layout.segment_indptr[rank]; i < layout.segment_indptr[rank + 1]; ++i) {
    const auto begin = tokens.begin() + layout.rank_start[i];
    std::iota(begin, tokens.begin() + layout.rank_stop[i], layout.batch_start[i]);
  }
  return tokens;
}

std::vector<int64_t> hidden_restore_idx(const PcpLayout& layout) {
  std::vector<int64_t> rows(layout.num_tokens);
  for_each_written(layout, [&](int64_t i, int64_t row) {
    std::iota(rows.data() + layout.batch_start[i], rows.data() + layout.batch_stop[i], row);
  });
  return rows;
}

std::vector<int64_t> padded_gather_idx(const PcpLayout& layout) {
  std::vector<int64_t> tokens(layout.pcp_size * layout.padded_num_tokens);
  for (int64_t rank = 0; rank < layout.pcp_size; ++rank) {
    const std::vector<int64_t> own = local_q_indices(layout, rank);
    std::ranges::copy(own, tokens.begin() + rank * layout.padded_num_tokens);
  }
  return tokens;
}

std::vector<uint8_t> gathered_kv_write_mask(const PcpLayout& layout) {
  std::vector<uint8_t> mask(layout.pcp_size * layout.padded_num_tokens);
  for_each_written(layout, [&](int64_t i, int64_t row) {
    std::fill_n(mask.data() + row, layout.rank_stop[i] - layout.rank_start[i], uint8_t{1});
  });
  return mask;
}

}  // namespace cpattn
