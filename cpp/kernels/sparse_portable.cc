// SPDX-License-Identifier: Apache-2.0
#include "kernels/vector_portable-inl.h"
// The vector layer comes first.
#include "kernels/gemm-inl.h"
// Then the engines, then the loops over them.
#include "kernels/sparse_table-inl.h"

namespace cpattn::kernels {

extern constinit const SparseKernelTable sparse_table_portable = sparse_table("portable");

}  // namespace cpattn::kernels
