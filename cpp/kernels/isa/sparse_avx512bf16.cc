// SPDX-License-Identifier: Apache-2.0
#include "kernels/vector/avx512-inl.h"
// The vector layer comes first.
#include "kernels/engines/gemm_bf16-inl.h"
#include "kernels/sparse/indexer_int8-inl.h"
// Then the engines, then the loops over them.
#include "kernels/isa/sparse_table-inl.h"

namespace cpattn::kernels {

namespace {
template <class T>
using Bfloat16Scorer = PanelScorer<T, FloatScores<Bfloat16Engine>>;
template <class T>
using Int8Scorer = PanelScorer<T, Int8Engine>;
}  // namespace

extern constinit const SparseKernelTable sparse_table_avx512bf16 =
    sparse_table("avx512bf16", indexer_kernels<Bfloat16Scorer, Int8Scorer>());

}  // namespace cpattn::kernels
