// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "cpattn/base/index_table.h"
#include "cpattn/base/tensor_view.h"
#include "cpattn/context_parallel/context_parallel.h"
#include "cpattn/sparse/indexer.h"

namespace cpattn {

/// One layer of the indexer on one rank. The cache has P pages of page_size rows, in one of the
/// forms that engines use:
///
///   rows    [P, page_size, D], [P, page_size, 1, D] or, by slots,
///           [P * page_size, 1, D]; bfloat16, float32, float8_e4m3fn or int8
///   packed  uint8 [P, page_size * (D + 4)], [P, page_size, D + 4] or
///           [P, page_size, 1, D + 4], in all three forms: a page is
///           page_size rows of D float8_e4m3fn, then their page_size float32 scales
struct CpIndexerArguments {
  TensorView q;        // [rows, H, D]: this rank's logical rows in the order of the metadata, then
                       // any number of pad rows; of the dtype of the keys
  TensorView weights;  // float32 or bfloat16 [rows, H] or [rows, H, 1]
  TensorView index_k_cache;
  std::optional<TensorView>
      k_scale;              // float32, one per row of unpacked keys: their shape without D
  IndexTable block_tables;  // [bs, pages]: the pages of each sequence, prefix included
  int64_t page_size = 0;
  int64_t topk = 0;
  std::optional<std::vector<int64_t>> prefix_lens;  // [bs], with bare metadata only
  bool sorted = true;
  int num_threads = 0;                       // 0: default_num_threads()
  TensorView indices;                        // int32 [rows, topk]
  const char* function = "cp_indexer_topk";  // this and the next are named in errors
  const char* q_name = "q";
  const char* k_scale_name = "k_scale";
};

/// Selects topk keys for each of a rank's tokens among all keys of its sequence up to its own,
/// cached prefix included. Writes positions within the sequence in the order of indexer_topk. One
/// call of indexer_topk takes all rows of all sequences, for any strategy, so a row has the same
/// result on every rank and without context parallelism. Pad rows are never read and come out as
/// -1.
///
/// The prefix counts once: baked metadata includes it and refuses prefix_lens; bare metadata of a
/// batch with a prefix needs the prefix_lens that it was built with. Throws std::invalid_argument
/// for a prefix that is counted twice or not at all, for fewer rows than the metadata has, for a
/// row that sees keys beyond the block table, and for shapes and dtypes that do not fit.
void cp_indexer_topk(const ContextParallelMetadata& metadata, const CpIndexerArguments& arguments);

}  // namespace cpattn
