// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cpattn/sparse/indexer.h"
#include "kernels/sparse/indexer_kernel.h"

namespace cpattn {

/// All that is wrong with arguments alone, without a result. Throws std::invalid_argument.
void check_indexer_arguments(const IndexerArguments& arguments);

/// A result of so many columns for the queries of the arguments.
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
