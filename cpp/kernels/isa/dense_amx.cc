// SPDX-License-Identifier: Apache-2.0
#include "kernels/vector/avx512-inl.h"
// The vector layer comes first.
#include "kernels/engines/amx/tiles-inl.h"
// Then the tiles, then the kernels over them.
#include "kernels/isa/amx_kernel_table-inl.h"

namespace cpattn::kernels {

extern constinit const KernelTable table_amx = amx_kernel_table("amx");

}  // namespace cpattn::kernels
