// SPDX-License-Identifier: Apache-2.0
#include "cpattn/transfer/kv_shards.h"

#include <algorithm>

#include "cpattn/base/check.h"

namespace cpattn {
namespace {

void check_rank(
    const CheckFor& require,
    const char* rank_name,
    int64_t rank,
    const char* size_name,
    int64_t size
) {
  require(size >= 1, size_name, " must be >= 1, got ", size);
  require(
      rank >= 0 && rank < size, rank_name, " must be in [0, ", size, ") of ", size_name, ", got ",
      rank
  );
}

/// The share of `rank` among `total` items that `size` ranks divide in order, larger shares first.
IndexRange even_share(int64_t rank, int64_t size, int64_t total) {
  const int64_t begin = rank * (total / size) + std::min(rank, total % size);
  return {begin, begin + total / size + (rank < total % size)};
}

}  // namespace

KVShardPages filter_kv_indices_for_shard_rank(
    std::span<const int64_t> kv_indices,
    IndexRange index_slice,
    int64_t shard_rank,
    int64_t shard_size
) {
  constexpr CheckFor require("filter_kv_indices_for_shard_rank");
  check_rank(require, "shard_rank", shard_rank, "shard_size", shard_size);
  require(
      index_slice.begin >= 0 && index_slice.end >= index_slice.begin,
      "index_slice must have 0 <= start <= stop, got ", index_slice
  );
  require(
      std::ssize(kv_indices) == index_slice.size(), "kv_indices must be the ", index_slice.size(),
      " pages of index_slice ", index_slice, ", got ", kv_indices.size()
  );
  KVShardPages owned;
  for (std::size_t i = 0; i < kv_indices.size(); ++i) {
    const int64_t page = kv_indices[i];
    require(page >= 0, "kv_indices must be >= 0, got ", page, " at index ", i);
    const int32_t local =
        narrow_to_int32(page / shard_size, "filter_kv_indices_for_shard_rank: local pages");
    if (page % shard_size != shard_rank) continue;
    owned.pages.push_back(local);
    owned.positions.push_back(index_slice.begin + static_cast<int64_t>(i));
  }
  return owned;
}

IndexRange filter_kv_indices_for_cp_rank(
    int64_t num_pages,
    int64_t start,
    std::optional<int64_t> end,
    int64_t total_pages,
    int64_t cp_rank,
    int64_t cp_size
) {
  constexpr CheckFor require("filter_kv_indices_for_cp_rank");
  check_rank(require, "attn_cp_rank", cp_rank, "attn_cp_size", cp_size);
  require(total_pages >= 0, "total_pages must be >= 0, got ", total_pages);
  const IndexRange chunk = {start, end.value_or(std::max(start, total_pages))};
  require(
      start >= 0 && chunk.end >= start, "index_slice must have 0 <= start <= stop, got ", chunk
  );
  require(
      end ? num_pages == chunk.size() : num_pages >= chunk.size(), "kv_indices must be the ",
      chunk.size(), " pages of index_slice ", chunk, ", got ", num_pages
  );
  const IndexRange share = intersect(chunk, even_share(cp_rank, cp_size, total_pages));
  if (share.size() == 0) return {0, 0};
  return {share.begin - start, share.end - start};
}

IndexRange get_layer_shard_range(int64_t rank, int64_t shard_size, int64_t total_layers) {
  constexpr CheckFor require("get_layer_shard_range");
  check_rank(require, "rank", rank, "shard_size", shard_size);
  require(total_layers >= 0, "total_layers must be >= 0, got ", total_layers);
  return even_share(rank, shard_size, total_layers);
}

int64_t get_layer_owner(int64_t local_layer_idx, int64_t shard_size, int64_t total_layers) {
  constexpr CheckFor require("get_layer_owner");
  require(shard_size >= 1, "shard_size must be >= 1, got ", shard_size);
  require(total_layers >= 0, "total_layers must be >= 0, got ", total_layers);
  require(
      local_layer_idx >= 0 && local_layer_idx < total_layers, "local_layer_idx must be in [0, ",
      total_layers, ") of total_layers, got ", local_layer_idx
  );
  const int64_t share = total_layers / shard_size;
  const int64_t larger = total_layers % shard_size;   // shares of one layer more
  const int64_t in_larger = larger * share + larger;  // share + 1 may not exist where larger is 0
  if (local_layer_idx < in_larger) return local_layer_idx / (share + 1);
  return larger + (local_layer_idx - in_larger) / share;
}

}  // namespace cpattn
