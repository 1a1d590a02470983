// SPDX-License-Identifier: Apache-2.0
#include "kernels/vector/neon-inl.h"
// The vector layer comes first.
#include "kernels/engines/gemm_neonbf16-inl.h"
#include "kernels/sparse/indexer_sdot-inl.h"
// Then the engines, then the loops over them.
#include "kernels/isa/sparse_table-inl.h"

namespace cpattn::kernels {

namespace {
template <class T>
using Bfloat16Scorer = PanelScorer<T, FloatScores<Bfloat16Engine>>;
template <class T>
using Int8Scorer = PanelScorer<T, Int8DotEngine>;
}  // namespace

extern constinit const SparseKernelTable sparse_table_neonbf16 =
    sparse_table("neonbf16", indexer_kernels<Bfloat16Scorer, Int8Scorer>());

}  // namespace cpattn::kernels
