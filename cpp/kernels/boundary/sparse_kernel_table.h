// SPDX-License-Identifier: Apache-2.0
#pragma once

// The kernels of sparse attention, in a table of their own: they are compiled apart
// from those of dense attention. Like attention_kernel.h, it includes only other boundaries of the
// project.
#include <stdint.h>

#include "kernels/boundary/indexer_kernel.h"
#include "kernels/boundary/rows_kernel.h"
#include "kernels/boundary/scatter_kernel.h"
#include "kernels/boundary/topk_kernel.h"

namespace cpattn::kernels {

struct SparseKernelTable {
  const char* name;
  RowKernels rows;
  ScatterKernels scatter;
  TopkKernel topk;
  IndexerKernels indexer;
};

extern const SparseKernelTable sparse_table_portable;
extern const SparseKernelTable sparse_table_avx2;
extern const SparseKernelTable sparse_table_avx512;
extern const SparseKernelTable sparse_table_avx512bf16;
extern const SparseKernelTable sparse_table_amxtwin;
extern const SparseKernelTable sparse_table_amx;
extern const SparseKernelTable sparse_table_neon;
extern const SparseKernelTable sparse_table_neonbf16;

}  // namespace cpattn::kernels
