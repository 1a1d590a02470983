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

/// Runs cp_indexer_topk, then flash_mla_sparse_fwd over the keys that it selects for each of a
/// rank's tokens. Results have the bits of these two calls, and so of a single rank. The indexer
/// never reads pad rows; they come out as rows without keys.
///
/// Throws std::invalid_argument before anything is written: for arguments that either function
/// refuses, for another number of rows of q, and for a selected slot beyond kv.
void cp_sparse_mla(const ContextParallelMetadata& metadata, const CpSparseMlaArguments& arguments);

}  // namespace cpattn
