// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <initializer_list>

#include "cpattn/base/index_table.h"
#include "cpattn/base/tensor_view.h"

namespace cpattn {

/// Checks only the shape: strides are free. All functions here throw std::invalid_argument that
/// names the function and the argument.
void check_shape(
    const char* function,
    const char* name,
    const TensorView& tensor,
    std::initializer_list<int64_t> shape
);

/// Checks the shape, and that the last dimension is contiguous.
void check_rows(
    const char* function,
    const char* name,
    const TensorView& tensor,
    std::initializer_list<int64_t> shape
);

void check_dtype(const char* function, const char* name, DType dtype, DType expected);

/// Checks a factor of scores, which kernels apply in float32.
void check_scale(const char* function, const char* name, double scale);

/// Checks a bound of scores, which kernels apply in float32; 0 stands for none.
void check_softcap(const char* function, double softcap);

/// The memory of a table, for check_no_overlap().
TensorView view_of(const IndexTable& table);

/// Checks that a result and an argument share no memory.
void check_no_overlap(
    const char* function,
    const char* out_name,
    const TensorView& out,
    const char* name,
    const TensorView& argument
);

}  // namespace cpattn
