// SPDX-License-Identifier: Apache-2.0
#include "kernels/vector/portable-inl.h"
// The vector layer comes first.
#include "kernels/engines/gemm-inl.h"
// Then the engines, then the loops over them.
#include "kernels/isa/kernel_table-inl.h"

namespace cpattn::kernels {

extern constinit const KernelTable table_portable =
    kernel_table("portable", vector_kernel<Bfloat16, Float32Engine, 4>());

}  // namespace cpattn::kernels
