// SPDX-License-Identifier: Apache-2.0
#include "kernels/vector/portable-inl.h"
// The vector layer comes first.
#include "kernels/engines/gemm-inl.h"
// Then the engines, then the loops over them.
#include "kernels/isa/sparse_table-inl.h"

namespace cpattn::kernels {

extern constinit const SparseKernelTable sparse_table_portable = sparse_table("portable");

}  // namespace cpattn::kernels
