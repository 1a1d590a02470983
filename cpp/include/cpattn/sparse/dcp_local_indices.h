// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "cpattn/base/tensor_view.h"

namespace cpattn {

/// The part of global top-k indices that one rank of decode context parallelism
/// owns, which holds position p of every sequence if p / interleave_size mod
/// dcp_size is dcp_rank: their positions among the keys that it holds, in order,
/// without gaps, then -1. Over all ranks this is every index >= 0 once.
///
///   indices, local  int32 [T, topk], local contiguous
void dcp_local_indices(
    const TensorView& indices,
    int64_t dcp_rank,
    int64_t dcp_size,
    int64_t interleave_size,
    const TensorView& local
);

}  // namespace cpattn
