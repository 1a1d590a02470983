// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "cpattn/context_parallel/context_parallel.h"

namespace cpattn {

/// The number of pairs of the first `tokens` new tokens of a sequence and the keys that they see.
constexpr int64_t pairs_of_first(int64_t prefix, int64_t tokens) {
  return tokens * prefix + tokens * (tokens + 1) / 2;
}

/// The weights and the page size of a batch, null if it has neither. Throws std::invalid_argument,
/// which names `function`, for weights and page sizes that break the rules of CpBatch.
std::shared_ptr<const CpWeights> checked_weights(const char* function, const CpBatch& batch);

/// Cuts all sequences in proportion to metadata.weights: [bs, blocks + 1] tokens before each block.
/// Only integers decide, so that all kinds of machines cut alike. Throws std::invalid_argument,
/// which names `function`, for fewer pages than ranks.
void fill_weighted_cuts(
    const char* function, const ContextParallelMetadata& metadata, std::span<int32_t> cuts
);

}  // namespace cpattn
