// SPDX-License-Identifier: Apache-2.0
#include "meta/context_parallel/weighted_cuts.h"

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "cpattn/base/check.h"
#include "meta/context_parallel/block_split.h"

namespace cpattn {
namespace {

constexpr int kShareBits = 30;

/// floor(value * share / 2^30) for 0 <= value < 2^62 and a share in [0, 2^30].
int64_t part_of(int64_t value, int64_t share) {
  const int64_t high = value >> kShareBits;
  const int64_t low = value & ((int64_t{1} << kShareBits) - 1);
  return high * share + ((low * share) >> kShareBits);
}

/// The total shares of the blocks before each block, in parts of 2^30: [num_blocks + 1]. Sums and
/// one division are rounded alike on every machine.
std::vector<int64_t> share_sums(const ContextParallelMetadata& metadata, int32_t num_blocks) {
  const std::vector<double>& weights = metadata.weights->weights;
  const double largest = weights.empty() ? 1 : std::ranges::max(weights);
  std::vector<double> sums(1);
  for (int32_t block = 0; block < num_blocks; ++block) {
    const int32_t rank = std::min(block, 2 * metadata.cp_size - 1 - block);
    sums.push_back(sums.back() + (weights.empty() ? 1 : weights[rank] / largest));
  }
  std::vector<int64_t> shares;
  shares.reserve(sums.size());
  for (const double sum : sums) {
    shares.push_back(std::llround(std::ldexp(sum / sums.back(), kShareBits)));
  }
  return shares;
}

/// The new tokens of one sequence, in pages.
class PagedTokens {
 public:
  PagedTokens(int64_t prefix, int64_t len, int64_t page_size)
      : prefix_(prefix), len_(len), page_size_(page_size), skipped_(prefix % page_size) {}

  int64_t num_pages() const {
    return len_ == 0 ? 0 : (skipped_ + len_ + page_size_ - 1) / page_size_;
  }
  int64_t pairs_before(int64_t tokens) const { return pairs_of_first(prefix_, tokens); }
  /// The pairs of the first `share` / 2^30 of all tokens, which may end within a token.
  int64_t pairs_before_share(int64_t share) const {
    const int64_t tokens = (len_ * share) >> kShareBits;
    const int64_t part = (len_ * share) & ((int64_t{1} << kShareBits) - 1);
    return pairs_before(tokens) + part_of(prefix_ + tokens + 1, part);
  }

  /// The tokens before the page at which the pairs before it are nearest to `pairs`.
  int64_t nearest_cut(int64_t pairs) const {
    int64_t low = 0, high = num_pages();
    while (low < high) {  // the last page with no more pairs before it
      const int64_t middle = low + (high - low + 1) / 2;
      if (pairs_before(tokens_before(middle)) <= pairs) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    const int64_t below = tokens_before(low), above = tokens_before(low + 1);
    return pairs - pairs_before(below) <= pairs_before(above) - pairs ? below : above;
  }

 private:
  int64_t tokens_before(int64_t page) const {
    return std::clamp(page * page_size_ - skipped_, int64_t{0}, len_);
  }

  int64_t prefix_, len_, page_size_;
  int64_t skipped_;  // cached tokens of the first page
};

}  // namespace

std::shared_ptr<const CpWeights> checked_weights(const char* function, const CpBatch& batch) {
  if (!batch.weights && !batch.page_size) return nullptr;
  check(
      batch.strategy != CpStrategy::interleave, function, ": ",
      batch.weights ? "weights" : "page_size",
      " must be None unless strategy is 'zigzag' or 'contiguous', got 'interleave'"
  );
  const auto given = std::make_shared<CpWeights>();
  if (batch.weights) {
    given->weights.assign(batch.weights->begin(), batch.weights->end());
    const auto count = static_cast<int64_t>(given->weights.size());
    check(
        count == batch.cp_size, function, ": weights must have cp_size = ", batch.cp_size,
        " values, got ", count
    );
    for (int64_t rank = 0; rank < count; ++rank) {
      const double weight = given->weights[rank];
      check(
          std::isfinite(weight) && weight > 0, function, ": weights must be finite and > 0, got ",
          weight, " at index ", rank
      );
    }
  }
  if (batch.page_size) {
    check(
        *batch.page_size >= 1 && *batch.page_size <= INT32_MAX, function,
        ": page_size must be >= 1 and fit into int32, got ", *batch.page_size
    );
    given->page_size = static_cast<int32_t>(*batch.page_size);
  }
  return given;
}

void fill_weighted_cuts(
    const char* function, const ContextParallelMetadata& metadata, std::span<int32_t> cuts
) {
  const bool zigzag = metadata.strategy == CpStrategy::zigzag;
  const int32_t num_blocks = (zigzag ? 2 : 1) * metadata.cp_size;
  const std::vector<int64_t> shares = share_sums(metadata, num_blocks);
  const int32_t page_size = metadata.weights->page_size;
  std::vector<int64_t> owed(num_blocks);  // pairs that the blocks before each block still lack
  int64_t num_pages = 0;
  for (int32_t s = 0; s < metadata.bs; ++s) {
    const int64_t len = metadata.extend_lens[s];
    const PagedTokens tokens(metadata.prefix_lens[s], len, std::max(page_size, 1));
    num_pages += tokens.num_pages();
    const std::span<int32_t> out = cuts.subspan(s * (int64_t{num_blocks} + 1), num_blocks + 1);
    int64_t cut = 0;
    out[0] = 0;
    for (int32_t block = 1; block < num_blocks; ++block) {
      // The halves of a zigzag lie around the middle, so that ranks with a share of the tokens have
      // the same share of the pairs.
      owed[block] += zigzag ? tokens.pairs_before_share(shares[block])
                            : part_of(tokens.pairs_before(len), shares[block]);
      cut = std::max(cut, tokens.nearest_cut(owed[block]));
      owed[block] -= tokens.pairs_before(cut);
      out[block] = static_cast<int32_t>(cut);
    }
    out[num_blocks] = static_cast<int32_t>(len);
  }
  check(
      page_size == 0 || num_pages >= metadata.cp_size, function,
      ": page_size must leave at least "
      "cp_size = ",
      metadata.cp_size, " pages with new tokens, got ", num_pages, " of ", page_size
  );
}

std::vector<int64_t> per_rank_pairs(const ContextParallelMetadata& metadata) {
  const int64_t size = metadata.cp_size;
  std::vector<int64_t> pairs(size);
  if (metadata.strategy == CpStrategy::interleave) {
    int64_t begin = 0;
    for (int32_t s = 0; s < metadata.bs; ++s) {
      const int64_t len = metadata.extend_lens[s];
      for (int64_t rank = 0; rank < size; ++rank) {
        const int64_t first = (rank - begin % size + size) % size;
        const int64_t rows = first < len ? (len - first + size - 1) / size : 0;
        pairs[rank] +=
            rows * (metadata.prefix_lens[s] + first + 1) + size * (rows * (rows - 1) / 2);
      }
      begin += len;
    }
    return pairs;
  }
  with_split(metadata, [&](const auto& split) {
    for (int32_t rank = 0; rank < size; ++rank) {
      for (int32_t half = 0; half < split.halves; ++half) {
        const int32_t block = block_of(split, rank, half);
        for (int32_t s = 0; s < metadata.bs; ++s) {
          const int64_t before = split.before(s, block), prefix = metadata.prefix_lens[s];
          pairs[rank] += pairs_of_first(prefix + before, split.size(s, block));
        }
      }
    }
  });
  return pairs;
}

double imbalance(const ContextParallelMetadata& metadata) {
  const std::vector<int64_t> pairs = per_rank_pairs(metadata);
  const auto* given = metadata.weights.get();
  const bool weighted = given != nullptr && !given->weights.empty();
  double sum_pairs = 0, sum_weights = 0, largest = 0;
  const double unit = weighted ? std::ranges::max(given->weights) : 1;  // sums stay finite
  for (std::size_t rank = 0; rank < pairs.size(); ++rank) {
    const double weight = weighted ? given->weights[rank] / unit : 1;
    sum_pairs += static_cast<double>(pairs[rank]);
    sum_weights += weight;
    largest = std::max(largest, static_cast<double>(pairs[rank]) / weight);
  }
  return sum_pairs == 0 ? 1 : largest * sum_weights / sum_pairs;
}

}  // namespace cpattn
