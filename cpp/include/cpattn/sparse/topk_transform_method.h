// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "cpattn/context_parallel/forward_mode.h"

namespace cpattn {

/// The unit of the indices of a top-k selection: slots of the cache (paged), or rows of
/// the concatenated keys and values of a batch (ragged).
enum class TopkTransformMethod : uint8_t { paged = 1, ragged };

/// The method of a number, if one is given. Throws std::invalid_argument, which names `function`,
/// for any number but 1 and 2.
std::optional<TopkTransformMethod> parse_topk_transform_method(
    const char* function, std::optional<int64_t> method
);

/// Returns ragged only for a batch of mode extend and an implementation of sparse prefill attention
/// that reads concatenated keys and values: flashmla_sparse and triton_sparse_mla from an
/// FP8 cache, flashmla_sparse_q8 from any. Throws std::invalid_argument, naming `function`, for an
/// implementation that engines do not have.
TopkTransformMethod get_topk_transform_method(
    std::optional<ForwardMode> mode,
    bool fp8_kv_cache,
    std::string_view prefill_impl,
    const char* function = "get_topk_transform_method"
);

}  // namespace cpattn
