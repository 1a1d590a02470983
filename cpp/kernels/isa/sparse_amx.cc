// SPDX-License-Identifier: Apache-2.0
#include "kernels/vector/avx512-inl.h"
// The vector layer comes first.
#include "kernels/engines/amx/tiles-inl.h"
// Then the tiles, then the kernels over them.
#include "kernels/isa/sparse_table-inl.h"
#include "kernels/sparse/amx/indexer-inl.h"

namespace cpattn::kernels {

extern constinit const SparseKernelTable sparse_table_amx =
    sparse_table("amx", indexer_kernels<AmxScorer, AmxScorer>());

}  // namespace cpattn::kernels
