// SPDX-License-Identifier: Apache-2.0
#include "cpattn/kv/placement.h"

#include <algorithm>
#include <cassert>

#include "cpattn/base/check.h"
#include "meta/kv/run_cursor.h"

namespace cpattn {
namespace {

void check_rank(const Interleave& interleave, const char* function, int64_t rank) {
  check(
      rank >= 0 && rank < interleave.shard_size, function, ": rank must be in [0, ",
      interleave.shard_size, "), got ", rank
  );
}

/// Calls visit(i, index, run) for each index that is no padding, and skip(i) for the others.
template <class Visit, class Skip>
void for_each_index(
    const Interleave& interleave, const IndexArgument& indices, Visit visit, Skip skip
) {
  RunCursor run(interleave);
  for (std::size_t i = 0; i < indices.values.size(); ++i) {
    const int64_t index = indices.values[i];
    check(
        index >= -1, indices.function, ": ", indices.name, " must be >= 0, or -1 for padding, got ",
        index, " at index ", i
    );
    if (index < 0) {
      skip(i);
      continue;
    }
    run.seek(index);
    visit(i, index, run);
  }
}

}  // namespace

void check_interleave(const Interleave& interleave, const char* function, const char* run_len) {
  check(
      interleave.shard_size >= 1 && interleave.shard_size <= kMaxShardSize, function,
      ": shard_size must be in [1, ", kMaxShardSize, "], got ", interleave.shard_size
  );
  check(
      interleave.run_len >= 1 && interleave.run_len <= kMaxRunLen, function, ": ", run_len,
      " must be in [1, ", kMaxRunLen, "], got ", interleave.run_len
  );
}

void owners_of(
    const Interleave& interleave, const IndexArgument& indices, std::span<int64_t> owners
) {
  assert(owners.size() == indices.values.size());
  for_each_index(
      interleave, indices,
      [owners](std::size_t i, int64_t, const RunCursor& run) { owners[i] = run.owner(); },
      [owners](std::size_t i) { owners[i] = -1; }
  );
}

void local_indices(
    const Interleave& interleave, const IndexArgument& indices, std::span<int64_t> local
) {
  assert(local.size() == indices.values.size());
  for_each_index(
      interleave, indices,
      [local](std::size_t i, int64_t index, const RunCursor& run) { local[i] = run.local(index); },
      [local](std::size_t i) { local[i] = -1; }
  );
}

LocalShare local_share(const Interleave& interleave, const IndexArgument& indices, int64_t rank) {
  check_rank(interleave, indices.function, rank);
  LocalShare share;
  for_each_index(
      interleave, indices,
      [&share, rank](std::size_t i, int64_t index, const RunCursor& run) {
        if (run.owner() != rank) return;
        share.positions.push_back(static_cast<int64_t>(i));
        share.local.push_back(run.local(index));
      },
      [](std::size_t) {}
  );
  return share;
}

void global_indices(
    const Interleave& interleave,
    int64_t rank,
    const IndexArgument& local,
    std::span<int64_t> indices
) {
  assert(indices.size() == local.values.size());
  check_rank(interleave, local.function, rank);
  const auto [shard_size, run_len] = interleave;
  // The rank has every shard_size-th of the runs whose indices all fit int64.
  const int64_t last_run = (INT64_MAX - run_len + 1) / run_len;
  const int64_t last = (last_run - rank) / shard_size * run_len + (run_len - 1);
  for (std::size_t i = 0; i < indices.size(); ++i) {
    const int64_t index = local.values[i];
    check(
        index >= -1 && index <= last, local.function, ": ", local.name, " must be in [0, ", last,
        "], or -1 for padding, got ", index, " at index ", i
    );
    const int64_t run = index / run_len;
    indices[i] = index < 0 ? -1 : (run * shard_size + rank) * run_len + index % run_len;
  }
}

void local_lens(
    const Interleave& interleave, const IndexArgument& lens, int64_t rank, std::span<int64_t> counts
) {
  assert(counts.size() == lens.values.size());
  check_rank(interleave, lens.function, rank);
  const auto [shard_size, run_len] = interleave;
  const int64_t cycle = shard_size * run_len;
  for (std::size_t i = 0; i < counts.size(); ++i) {
    const int64_t len = lens.values[i];
    check(len >= 0, lens.function, ": ", lens.name, " must be >= 0, got ", len, " at index ", i);
    const int64_t rest = std::clamp<int64_t>(len % cycle - rank * run_len, 0, run_len);
    counts[i] = len / cycle * run_len + rest;
  }
}

}  // namespace cpattn
