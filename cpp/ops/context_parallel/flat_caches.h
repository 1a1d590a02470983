// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>

#include "cpattn/attention/paged_attention.h"
#include "cpattn/context_parallel/cp_attention.h"

namespace cpattn {

/// The caches of a call in the form of the kernels.
struct FlatCaches {
  PagedCache k, v;
  std::optional<PagedCache> k_rope;
};

/// Reads the caches of a call whose queries have head_dim dimensions, and rope_dim in q_rope.
/// Throws std::invalid_argument, naming `function`, for sizes and axes that do not fit.
FlatCaches flat_caches(
    const char* function, const CpAttentionArguments& arguments, int64_t head_dim, int64_t rope_dim
);

}  // namespace cpattn
