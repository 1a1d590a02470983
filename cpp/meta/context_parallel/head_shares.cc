// SPDX-License-Identifier: Apache-2.0
#include "cpattn/context_parallel/head_shares.h"

#include <algorithm>

#include "cpattn/base/check.h"

namespace cpattn {
std::vector<HeadShare> share_heads(int64_t num_heads, int64_t num_kv_heads, int64_t num_ranks) {
  constexpr CheckFor kCheck{"share_heads"};
  constexpr int64_t kMostRanks = 1 << 20, kMostHeads = int64_t{1} << 40;
  kCheck(
      num_ranks >= 1 && num_ranks <= kMostRanks, "num_ranks must be from 1 to ", kMostRanks,
      ", got ", num_ranks
  );
  kCheck(num_heads <= kMostHeads, "num_heads must be at most ", kMostHeads, ", got ", num_heads);
  kCheck(
      num_kv_heads >= 1 && num_heads >= num_kv_heads && num_heads % num_kv_heads == 0,
      "num_heads must be a multiple of num_kv_heads, got ", num_heads, " and ", num_kv_heads
  );
  const int64_t group = num_heads / num_kv_heads;
  std::vector<HeadShare> shares(num_ranks);
  for (int64_t rank = 0; rank < num_ranks; ++rank) {
    const int64_t begin = num_kv_heads * rank / num_ranks;
    HeadShare& share = shares[rank];
    if (num_kv_heads >= num_ranks) {
      share.kv = {begin, num_kv_heads * (rank + 1) / num_ranks};
      share.q = {begin * group, share.kv.end * group};
      continue;
    }
    // Ranks [first, last) take turns with a group.
    const auto first_of = [&](int64_t head) {
      return (head * num_ranks + num_kv_heads - 1) / num_kv_heads;
    };
    const int64_t first = first_of(begin), turns = first_of(begin + 1) - first;
    const int64_t turn = rank - first;
    share.q = {begin * group + group * turn / turns, begin * group + group * (turn + 1) / turns};
    share.kv = {begin, begin + (share.q.size() > 0 ? 1 : 0)};
  }
  return shares;
}

std::vector<std::vector<HeadShare>> split_shares(
    const std::vector<HeadShare>& shares, int64_t num_parts
) {
  for (const HeadShare& share : shares) num_parts = std::min(num_parts, share.kv.size());
  num_parts = std::max<int64_t>(num_parts, 1);
  std::vector<std::vector<HeadShare>> parts(num_parts, shares);
  for (int64_t part = 0; part < num_parts; ++part) {
    for (HeadShare& share : parts[part]) {
      const int64_t count = share.kv.size(), group = count > 0 ? share.q.size() / count : 0;
      const int64_t begin = count * part / num_parts, end = count * (part + 1) / num_parts;
      share.q = {share.q.begin + begin * group, share.q.begin + end * group};
      share.kv = {share.kv.begin + begin, share.kv.begin + end};
    }
  }
  return parts;
}

std::vector<HeadRange> head_rounds(
    int64_t num_kv_heads, int64_t received_bytes, double flops, const RoundLimits& limits
) {
  constexpr CheckFor kCheck{"head_rounds"};
  kCheck(limits.most_rounds >= 1, "most_rounds must be >= 1, got ", limits.most_rounds);
  kCheck(limits.least_bytes >= 1, "least_bytes must be >= 1, got ", limits.least_bytes);
  int64_t rounds =
      std::min({num_kv_heads, limits.most_rounds, received_bytes / limits.least_bytes});
  const double most_flops = limits.most_flops_per_byte * static_cast<double>(received_bytes);
  if (flops > most_flops || rounds < 1) rounds = 1;
  int64_t at_once = (num_kv_heads + rounds - 1) / rounds;
  if (limits.most_heads) {
    kCheck(*limits.most_heads >= 1, "most_heads must be >= 1, got ", *limits.most_heads);
    at_once = std::min(at_once, *limits.most_heads);
  }
  std::vector<HeadRange> ranges;
  for (int64_t head = 0; head < num_kv_heads; head += at_once) {
    ranges.push_back({head, std::min(head + at_once, num_kv_heads)});
  }
  return ranges;
}

}  // namespace cpattn
