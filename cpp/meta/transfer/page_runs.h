// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <compare>
#include <cstdint>
#include <span>
#include <vector>

#include "cpattn/transfer/transfer_plan.h"

namespace cpattn {

/// The places of tokens and heads in one side's buffer: head h of slot page * page_size + t is page
/// * page_stride + t * token_stride + h * head_stride after the first.
struct PageShape {
  int64_t page_size = 1;
  uint64_t page_stride = 0;
  uint64_t token_stride = 0;
  uint64_t head_stride = 0;

  auto operator<=>(const PageShape&) const = default;
};

/// The places of both sides. `bytes` of each head of a token are sent.
struct PairShape {
  PageShape src;
  PageShape dst;
  int64_t num_heads = 1;
  uint64_t bytes = 0;

  auto operator<=>(const PairShape&) const = default;
};

/// Returns the bytes of runs of slots as the least number of runs of bytes, ascending in the
/// destination; the slots of each side are distinct. Throws std::invalid_argument for more than
/// 2^24 runs.
std::vector<TransferRun> byte_runs(const PairShape& shape, std::span<const TransferRun> slots);

}  // namespace cpattn
