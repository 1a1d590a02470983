// SPDX-License-Identifier: Apache-2.0
#pragma once

// The table that ops calls the kernels of sparse attention through. Needs the vector
// layer and the engines included first.
#include "kernels/boundary/sparse_kernel_table.h"
#include "kernels/kv/scatter-inl.h"
#include "kernels/sparse/indexer-inl.h"
#include "kernels/sparse/rows-inl.h"
#include "kernels/sparse/topk_row-inl.h"

namespace cpattn::kernels {
namespace {

constexpr SparseKernelTable sparse_table(
    const char* name, IndexerKernels indexer = indexer_kernels()
) {
  return {
      .name = name,
      .rows = row_kernels(),
      .scatter = scatter_kernels(),
      .topk = {topk_scratch_bytes, topk_select, topk_block_maxima},
      .indexer = indexer,
  };
}

}  // namespace
}  // namespace cpattn::kernels
