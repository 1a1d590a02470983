// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>

#include "cpattn/base/tensor_view.h"
#include "kernels/boundary/attention_kernel.h"
#include "kernels/boundary/sparse_kernel_table.h"

namespace cpattn {

/// The kernels of active_isa().
const kernels::KernelTable& active_kernels();
const kernels::SparseKernelTable& active_sparse_kernels();

/// The kernel index of codes of 8 bits; nothing for other dtypes.
std::optional<kernels::CodeType> code_type(DType dtype);

/// The kernel index of a dtype. Throws std::invalid_argument for a dtype that
/// attention does not compute in; `function` and `name` go into the message.
kernels::ElementType element_type(const char* function, const char* name, DType dtype);

}  // namespace cpattn
