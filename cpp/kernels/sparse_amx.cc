// SPDX-License-Identifier: Apache-2.0
#include "kernels/vector_avx512-inl.h"
// The vector layer comes first.
#include "kernels/amx_tiles-inl.h"
// Then the tiles, then what is made of both.
#include "kernels/amx_indexer-inl.h"
#include "kernels/sparse_table-inl.h"

namespace cpattn::kernels {

extern constinit const SparseKernelTable sparse_table_amx =
    sparse_table("amx", indexer_kernels<AmxScorer, AmxScorer>());

}  // namespace cpattn::kernels
