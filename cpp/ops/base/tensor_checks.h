// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <initializer_list>

#include "cpattn/base/index_table.h"
#include "cpattn/base/tensor_view.h"

namespace cpattn {

/// The shape alone: strides are free. As all of these, throws std::invalid_argument
/// that names the function and the argument.
void check_shape(
    const char* function,
    const char* name,
    const TensorView& tensor,
    std::initializer_list<int64_t> shape
);

/// The shape, and that the last dimension is contiguous.
void check_rows(
    const char* function,
    const char* name,
    const TensorView& tensor,
    std::initializer_list<int64_t> shape
);

void check_dtype(const char* function, const char* name, DType dtype, DType expected);

/// A factor of scores, which kernels apply in float32.
void check_scale(const char* function, const char* name, double scale);

/// A bound of scores, likewise; 0 is none.
void check_softcap(const char* function, double softcap);

/// The memory of a table, for the check below.
TensorView view_of(const IndexTable& table);

/// That a result and an argument share no memory.
void check_no_overlap(
    const char* function,
    const char* out_name,
    const TensorView& out,
    const char* name,
    const TensorView& argument
);

}  // namespace cpattn
