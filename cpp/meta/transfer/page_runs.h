// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <compare>
#include <cstdint>
#include <span>
#include <vector>

#include "cpattn/transfer/transfer_plan.h"

namespace cpattn {

/// The places of tokens and heads in one side's buffer: token t of slot page * page_size + t and
/// its h-th head are page * page_stride + t * token_stride + h * head_stride behind the first.
struct PageShape {
  int64_t page_size = 1;
  uint64_t page_stride = 0;
  uint64_t token_stride = 0;
  uint64_t head_stride = 0;

  auto operator<=>(const PageShape&) const = default;
};

/// The places of both sides, and what is sent of a token: `bytes` of each of its heads.
struct PairShape {
  PageShape src;
  PageShape dst;
  int64_t num_heads = 1;
  uint64_t bytes = 0;

  auto operator<=>(const PairShape&) const = default;
};

/// Returns the bytes of runs of slots as the least number of runs of bytes, ascending in the
/// destination; the slots of each side are distinct. Throws std::invalid_argument if they are in
/// more than 2^24 pieces.
std::vector<TransferRun> byte_runs(const PairShape& shape, std::span<const TransferRun> slots);

}  // namespace cpattn
