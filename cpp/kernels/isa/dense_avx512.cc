// SPDX-License-Identifier: Apache-2.0
#include "kernels/vector/avx512-inl.h"
// The vector layer comes first.
#include "kernels/engines/gemm-inl.h"
// Then the engines, then the loops over them.
#include "kernels/isa/kernel_table-inl.h"

namespace cpattn::kernels {

extern constinit const KernelTable table_avx512 =
    kernel_table("avx512", vector_kernel<Bfloat16, Float32Engine, 4>());

}  // namespace cpattn::kernels
