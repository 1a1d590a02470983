// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cpattn/sparse/cp_indexer.h"
#include "cpattn/sparse/sparse_mla.h"

namespace cpattn {

/// One layer of sparse attention on one rank: the indexer, and attention over what it selects.
/// kv has the slots of the index keys: those of the pages of block_tables.
struct CpSparseMlaArguments {
  CpIndexerArguments indexer;    // without `indices`
  SparseMlaArguments attention;  // without `indices` and topk_length; rows of q as of indexer.q
};

/// What cp_indexer_topk selects for each of a rank's tokens, attended to by flash_mla_sparse_fwd:
/// the bits of these two, and so of a single rank. Pad rows are never read by the indexer, and come
/// out as rows without keys.
///
/// Throws std::invalid_argument before anything is written: for what each of the two refuses, for
/// another number of rows of q, and for a selected slot beyond kv.
void cp_sparse_mla(const ContextParallelMetadata& metadata, const CpSparseMlaArguments& arguments);

}  // namespace cpattn
