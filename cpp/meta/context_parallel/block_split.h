// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cassert>
#include <cstdint>
#include <span>
#include <vector>

#include "cpattn/context_parallel/context_parallel.h"

namespace cpattn {

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

// The splits below cut every sequence into blocks; each rank owns `halves` blocks of it. `before`
// counts the tokens of sequence s before a block.

struct ZigzagSplit {
  static constexpr int32_t halves = 2;
  int32_t num_blocks;
  DividedLens lens;

  int32_t before(int32_t s, int32_t block) const {
    return lens.base[s] * block + std::min(block, lens.rest[s]);
  }
  int32_t size(int32_t s, int32_t block) const {
    return lens.base[s] + (block < lens.rest[s] ? 1 : 0);
  }
};

struct EvenSplit {
  static constexpr int32_t halves = 1;
  int32_t num_blocks;
  DividedLens lens;

  int32_t before(int32_t s, int32_t block) const {
    return lens.base[s] * block + lens.rest[s] * block / num_blocks;
  }
  int32_t size(int32_t s, int32_t block) const { return before(s, block + 1) - before(s, block); }
};

/// Cuts at given tokens, as weighted_cuts.h makes them.
struct CutSplit {
  int32_t halves;
  int32_t num_blocks;
  std::span<const int32_t> cuts;

  int32_t before(int32_t s, int32_t block) const {
    return cuts[s * (int64_t{num_blocks} + 1) + block];
  }
  int32_t size(int32_t s, int32_t block) const { return before(s, block + 1) - before(s, block); }
};

/// Calls visit(split) with the split of metadata whose strategy is not interleave.
template <class Visit>
auto with_split(const ContextParallelMetadata& metadata, Visit visit) {
  assert(metadata.strategy != CpStrategy::interleave);
  const bool zigzag = metadata.strategy == CpStrategy::zigzag;
  const int32_t num_blocks = (zigzag ? 2 : 1) * metadata.cp_size;
  if (metadata.cuts.data() != nullptr) {
    return visit(CutSplit{zigzag ? 2 : 1, num_blocks, metadata.cuts});
  }
  const DividedLens lens(metadata.extend_lens, num_blocks);
  if (zigzag) return visit(ZigzagSplit{num_blocks, lens});
  return visit(EvenSplit{num_blocks, lens});
}

/// The block of a rank's first or second half.
template <class Split>
int32_t block_of(const Split& split, int32_t rank, int32_t half) {
  return half == 0 ? rank : split.num_blocks - 1 - rank;
}

}  // namespace cpattn
