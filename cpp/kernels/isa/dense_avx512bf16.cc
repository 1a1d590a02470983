// SPDX-License-Identifier: Apache-2.0
#include "kernels/vector/avx512-inl.h"
// The vector layer comes first.
#include "kernels/engines/unpacked_bf16-inl.h"
// Then the engines, then the loops over them.
#include "kernels/isa/kernel_table-inl.h"

namespace cpattn::kernels {

extern constinit const KernelTable table_avx512bf16 =
    kernel_table("avx512bf16", vector_kernel<Bfloat16, Bfloat16Engine, 4>());

}  // namespace cpattn::kernels
