// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace cpattn {

/// Far above any group of ranks; with kMaxRunLen small enough for 64-bit products.
constexpr int64_t kMaxShardSize = int64_t{1} << 15;
constexpr int64_t kMaxRunLen = INT32_MAX;

/// The division of indices over a group of ranks: runs of `run_len` consecutive indices go to
/// the ranks in turn. Index x is in run l = x / run_len; rank l % shard_size holds it, under the
/// local index (l / shard_size) * run_len + x % run_len.
///
/// An index of a pool that is striped by pages is a slot of the group, run_len the page size, and
/// the local index a row of the rank's own pool. An index of decode context parallelism is the
/// position of a token in its sequence, run_len the interleave, and the local index the position
/// among the tokens of the sequence that the rank keeps.
struct Interleave {
  int64_t shard_size = 1;  // 1 .. kMaxShardSize
  int64_t run_len = 1;     // 1 .. kMaxRunLen

  bool operator==(const Interleave&) const = default;
};

/// Throws std::invalid_argument, in the name of `function`, where a size is out of bounds.
/// `run_len` is the caller's name for the length of a run.
void check_interleave(const Interleave& interleave, const char* function, const char* run_len);

/// The indices of a call, with the names that its errors have.
struct IndexArgument {
  const char* function;
  const char* name;
  std::span<const int64_t> values;
};

/// Indices of the functions below are >= -1; -1 is padding, which no rank holds. Ranks are in
/// [0, shard_size). Anything else throws std::invalid_argument. Results are as long as the indices.

/// The rank of each index; -1 for padding.
void owners_of(
    const Interleave& interleave, const IndexArgument& indices, std::span<int64_t> owners
);

/// The local index of each index on its rank; -1 for padding.
void local_indices(
    const Interleave& interleave, const IndexArgument& indices, std::span<int64_t> local
);

/// The indices of a list that a rank holds, in the order of the list.
struct LocalShare {
  std::vector<int64_t> positions;  // in the list, ascending
  std::vector<int64_t> local;      // the local index of each

  bool operator==(const LocalShare&) const = default;
};
LocalShare local_share(const Interleave& interleave, const IndexArgument& indices, int64_t rank);

/// The index of each local index of a rank, which must fit int64: the inverse of local_indices().
void global_indices(
    const Interleave& interleave,
    int64_t rank,
    const IndexArgument& local,
    std::span<int64_t> indices
);

/// Counts, for each len, the indices 0, ..., len - 1 that a rank holds; all lens are >= 0.
void local_lens(
    const Interleave& interleave, const IndexArgument& lens, int64_t rank, std::span<int64_t> counts
);

}  // namespace cpattn
