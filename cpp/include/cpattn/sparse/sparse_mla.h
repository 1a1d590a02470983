// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "cpattn/base/tensor_view.h"

namespace cpattn {

/// Multi-head latent attention over keys that were selected for each token.
struct SparseMlaArguments {
  TensorView q;        // [num_tokens, num_heads, head_dim]
  TensorView kv;       // [num_rows, 1, head_dim] or [num_pages, page_size, 1, head_dim], dtype
                       // of q; or rows of kKvRowBytes bytes (uint8 or float8) in place of head_dim
  TensorView indices;  // int32 or int64 [num_tokens, 1, topk] or [num_tokens, topk]
  double scale = 1;    // multiplies q . k
  int64_t v_head_dim = 0;                           // the first dimensions of a row are its value
  std::optional<TensorView> attn_sink;              // float32 [num_heads], one more logit a row
  std::optional<std::vector<int64_t>> topk_length;  // [num_tokens]: the entries of a row that count
  TensorView out;                                 // [num_tokens, num_heads, v_head_dim], dtype of q
  TensorView max_logits;                          // float32 [num_tokens, num_heads], contiguous
  TensorView lse;                                 // float32 [num_tokens, num_heads], contiguous
  int num_threads = 0;                            // 0: default_num_threads()
  const char* function = "flash_mla_sparse_fwd";  // named in errors
};

/// Computes, for every token and head, over the rows of kv that its indices name:
///   out = softmax_j(scale * q . k_j, and the sink) v_j,   v_j the start of k_j
///   lse = log sum_j exp(scale * q . k_j), max_logits = max_j scale * q . k_j
/// both without the sink. An index below 0 or beyond the rows is no key, wherever it stands; an
/// index that occurs twice counts twice. Without keys out is zeros, lse and max_logits are -inf.
/// Rows that are not named are never read. FP8 rows give the same bits as these rows expanded to
/// bfloat16 before.
///
/// Throws std::invalid_argument before anything is written.
void flash_mla_sparse_fwd(const SparseMlaArguments& arguments);

}  // namespace cpattn
