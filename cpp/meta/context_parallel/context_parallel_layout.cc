// SPDX-License-Identifier: Apache-2.0
#include <numeric>

#include "cpattn/base/check.h"
#include "cpattn/context_parallel/context_parallel.h"
#include "meta/context_parallel/block_split.h"

namespace cpattn {
namespace {

/// The array over all blocks of the batch that fill(split, out) writes.
template <class Fill>
std::vector<int32_t> over_blocks(
    const ContextParallelMetadata& metadata, const char* function, Fill fill
) {
  check(
      metadata.strategy != CpStrategy::interleave, function,
      ": strategy must be 'zigzag' or 'contiguous', got 'interleave'"
  );
  return with_split(metadata, [&](const auto& split) {
    std::vector<int32_t> blocks(int64_t{metadata.bs} * split.num_blocks);
    fill(split, blocks.data());
    return blocks;
  });
}

}  // namespace

std::vector<int32_t> split_list(const ContextParallelMetadata& metadata) {
  return over_blocks(metadata, "split_list", [&](const auto& split, int32_t* out) {
    const int32_t n = split.num_blocks;
    for (int32_t s = 0; s < metadata.bs; ++s, out += n) {
      for (int32_t i = 0; i < n; ++i) out[i] = split.size(s, i);
    }
  });
}

std::vector<int32_t> reverse_split_len(const ContextParallelMetadata& metadata) {
  return over_blocks(metadata, "reverse_split_len", [&](const auto& split, int32_t* out) {
    for (int32_t rank = 0; rank < metadata.cp_size; ++rank) {
      for (int32_t half = 0; half < split.halves; ++half, out += metadata.bs) {
        const int32_t block = block_of(split, rank, half);
        for (int32_t s = 0; s < metadata.bs; ++s) out[s] = split.size(s, block);
      }
    }
  });
}

std::vector<int32_t> cp_reverse_index(const ContextParallelMetadata& metadata) {
  return over_blocks(metadata, "cp_reverse_index", [&](const auto& split, int32_t* out) {
    const int32_t n = split.num_blocks;
    const int32_t bs = metadata.bs;
    for (int32_t s = 0; s < bs; ++s, out += n) {
      for (int32_t i = 0; i < metadata.cp_size; ++i) out[i] = split.halves * bs * i + s;
      for (int32_t i = metadata.cp_size; i < n; ++i) out[i] = 2 * bs * (n - 1 - i) + bs + s;
    }
  });
}

std::vector<int32_t> gathered_row_indices(const ContextParallelMetadata& metadata) {
  std::vector<int32_t> rows(metadata.total_seq_lens);
  if (metadata.strategy == CpStrategy::interleave) {
    int32_t row = 0;
    for (int32_t rank = 0; rank < metadata.cp_size; ++rank) {
      const int32_t count = metadata.logical_rows()[rank];
      for (int32_t i = 0; i < count; ++i) rows[int64_t{i} * metadata.cp_size + rank] = row++;
    }
    return rows;
  }
  std::vector<int32_t> starts = reverse_split_len(metadata);
  std::exclusive_scan(starts.begin(), starts.end(), starts.begin(), 0);
  const std::vector<int32_t> sizes = split_list(metadata);
  const std::vector<int32_t> order = cp_reverse_index(metadata);
  auto out = rows.begin();
  for (std::size_t block = 0; block < sizes.size(); ++block) {
    std::iota(out, out + sizes[block], starts[order[block]]);
    out += sizes[block];
  }
  return rows;
}

}  // namespace cpattn
