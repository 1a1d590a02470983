// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "cpattn/base/tensor_view.h"

namespace cpattn {

/// Writes the part of global top-k indices that one rank of decode context parallelism owns. The
/// rank holds position p of every sequence if p / interleave_size mod dcp_size is dcp_rank. `local`
/// gets the positions of the indices among the keys that the rank holds, in their order, without
/// gaps, then -1. All ranks together have every index >= 0 once.
///
///   indices, local  int32 [T, topk], the last dimension contiguous
///
/// Throws std::invalid_argument, before anything is written, for shapes and dtypes that do not fit,
/// local that overlaps indices, sizes that are not from 1 to 2^31 - 1 and a dcp_rank outside
/// [0, dcp_size).
void dcp_local_indices(
    const TensorView& indices,
    int64_t dcp_rank,
    int64_t dcp_size,
    int64_t interleave_size,
    const TensorView& local
);

}  // namespace cpattn
