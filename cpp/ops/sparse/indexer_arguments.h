// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cpattn/sparse/indexer.h"
#include "kernels/boundary/indexer_kernel.h"

namespace cpattn {

/// Throws std::invalid_argument for every fault of the arguments except the result.
void check_indexer_arguments(const IndexerArguments& arguments);

/// Checks a result, which has `columns` columns for each query of the arguments.
void check_indexer_result(
    const IndexerArguments& arguments,
    const char* name,
    const TensorView& result,
    DType dtype,
    int64_t columns
);

/// The kernel index of the dtype of checked keys.
kernels::IndexerType indexer_type(DType dtype);

}  // namespace cpattn
