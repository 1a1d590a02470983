// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>

#include "cpattn/base/tensor_view.h"
#include "cpattn/sparse/indexer.h"

namespace cpattn {

/// Reads a cache of rows of `dim` numbers, in any of the forms that cp_indexer.h lists. Throws
/// std::invalid_argument, naming `function`, for any other.
IndexKeys view_index_keys(
    const char* function,
    const TensorView& index_k_cache,
    const std::optional<TensorView>& k_scale,
    int64_t page_size,
    int64_t dim,
    const char* k_scale_name = "k_scale"
);

}  // namespace cpattn
