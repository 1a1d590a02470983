// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace cpattn {

/// Heads [begin, end).
struct HeadRange {
  int64_t begin = 0, end = 0;
  int64_t size() const { return end - begin; }
  bool operator==(const HeadRange&) const = default;
};

/// Query heads of a rank, and the KV heads that they read: none without query heads.
struct HeadShare {
  HeadRange q, kv;
  bool operator==(const HeadShare&) const = default;
};

/// Shares heads out to ranks: whole groups with their KV head, or parts of one group if there are
/// more ranks than KV heads. Throws std::invalid_argument for numbers below 1, and KV heads that do
/// not divide the heads.
std::vector<HeadShare> share_heads(int64_t num_heads, int64_t num_kv_heads, int64_t num_ranks);

/// Cuts shares into num_parts parts, each of some KV heads of every rank; fewer if a rank has
/// fewer.
std::vector<std::vector<HeadShare>> split_shares(
    const std::vector<HeadShare>& shares, int64_t num_parts
);

/// Limits of rounds that exchange some KV heads while others are attended to.
struct RoundLimits {
  int64_t most_rounds = 1;
  int64_t least_bytes = 1;                           // that a rank receives in a round
  double most_flops_per_byte = 0;                    // in all rounds: above it, one round is enough
  std::optional<int64_t> most_heads = std::nullopt;  // of a round
};
/// The KV heads of each round, for a rank that receives `received_bytes` in all rounds while it
/// computes `flops`. Throws std::invalid_argument for limits below 1.
std::vector<HeadRange> head_rounds(
    int64_t num_kv_heads, int64_t received_bytes, double flops, const RoundLimits& limits
);

}  // namespace cpattn
