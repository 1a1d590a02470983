// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "cpattn/transfer/transfer_plan.h"

namespace cpattn {

/// ceil(num_tokens / page_size).
int64_t kv_to_page_num(int64_t num_tokens, int64_t page_size);

/// The pages of a request's token slots: every page_size-th slot, divided by page_size. The
/// slots start on a page boundary and fill their pages in order; only the last may be partial.
std::vector<int32_t> kv_to_page_indices(std::span<const int64_t> kv_indices, int64_t page_size);

/// Returns the fewest runs that are consecutive on both sides, in the order given: a new run starts
/// wherever either index does not follow its predecessor. There are none if either side is empty.
/// Other lists of unequal lengths throw std::invalid_argument, with the engines' own message.
std::vector<TransferRun> group_runs(
    std::span<const int64_t> src_indices, std::span<const int64_t> dst_indices
);

}  // namespace cpattn
