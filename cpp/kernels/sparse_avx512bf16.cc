// SPDX-License-Identifier: Apache-2.0
#include "kernels/vector_avx512-inl.h"
// The vector layer comes first.
#include "kernels/gemm_bf16-inl.h"
// Then the engines, then the loops over them.
#include "kernels/sparse_table-inl.h"

namespace cpattn::kernels {

extern constinit const SparseKernelTable sparse_table_avx512bf16 =
    sparse_table("avx512bf16", indexer_kernels<FloatScores<Bfloat16Engine>>());

}  // namespace cpattn::kernels
