// SPDX-License-Identifier: Apache-2.0
#include "kernels/vector/neon-inl.h"
// The vector layer comes first.
#include "kernels/engines/gemm_neonbf16-inl.h"
// Then the engines, then the loops over them.
#include "kernels/isa/kernel_table-inl.h"

namespace cpattn::kernels {

extern constinit const KernelTable table_neonbf16 =
    kernel_table("neonbf16", vector_kernel<Bfloat16, Bfloat16PairEngine, 4, Float32Engine>());

}  // namespace cpattn::kernels
