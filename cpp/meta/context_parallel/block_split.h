// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cassert>
#include <cstdint>
#include <span>
#include <vector>

#include "cpattn/context_parallel/context_parallel.h"

namespace cpattn {

// The splits below cut a sequence of base * num_blocks + rest tokens into blocks. Every rank
// owns `halves` of them; `before` counts the tokens in front of a block.

struct ZigzagSplit {
  static constexpr int32_t halves = 2;
  int32_t num_blocks;

  int32_t before(int32_t base, int32_t rest, int32_t block) const {
    return base * block + std::min(block, rest);
  }
  int32_t size(int32_t base, int32_t rest, int32_t block) const {
    return base + (block < rest ? 1 : 0);
  }
};

struct EvenSplit {
  static constexpr int32_t halves = 1;
  int32_t num_blocks;

  int32_t before(int32_t base, int32_t rest, int32_t block) const {
    return base * block + rest * block / num_blocks;
  }
  int32_t size(int32_t base, int32_t rest, int32_t block) const {
    return before(base, rest, block + 1) - before(base, rest, block);
  }
};

/// Calls visit(split) with the split of a strategy other than interleave.
template <class Visit>
auto with_split(CpStrategy strategy, int32_t cp_size, Visit visit) {
  assert(strategy != CpStrategy::interleave);
  if (strategy == CpStrategy::zigzag) return visit(ZigzagSplit{2 * cp_size});
  return visit(EvenSplit{cp_size});
}

/// base and rest of every sequence, for loops that run along the sequences.
struct DividedLens {
  std::vector<int32_t> base, rest;

  DividedLens(std::span<const int32_t> lens, int32_t num_blocks)
      : base(lens.size()), rest(lens.size()) {
    for (std::size_t s = 0; s < lens.size(); ++s) {
      base[s] = lens[s] / num_blocks;
      rest[s] = lens[s] % num_blocks;
    }
  }
};

/// The block of a rank's first or second half.
template <class Split>
int32_t block_of(const Split& split, int32_t rank, int32_t half) {
  return half == 0 ? rank : split.num_blocks - 1 - rank;
}

}  // namespace cpattn
