// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>

#include "cpattn/attention/attention_plan.h"
#include "cpattn/attention/score_bias.h"
#include "cpattn/base/kv_axis_order.h"
#include "cpattn/base/tensor_view.h"

namespace cpattn {

/// A paged K or V cache reduced to strides (in elements): the vector of head h
/// of token slot (page, offset) is at data + page * page_stride +
/// offset * row_stride + h * head_stride.
struct PagedCache {
  void* data = nullptr;
  DType dtype = DType::float32;
  int64_t num_pages = 0;
  int64_t page_size = 0;
  int64_t num_kv_heads = 0;
  int64_t head_dim = 0;
  int64_t page_stride = 0;
  int64_t row_stride = 0;
  int64_t head_stride = 0;
  TensorView tensor;  // as the caller gave it, for overlap checks and messages
};

/// Reads a cache argument: [num_pages, page_size, num_kv_heads, head_dim] (NHD),
/// [num_pages, num_kv_heads, page_size, head_dim] (HND), or, with page_size and
/// NHD, [num_slots, num_kv_heads, head_dim] with num_slots a multiple of page_size.
/// If page_size is given, the pages of a 4-D cache must have that many tokens. Throws
/// std::invalid_argument, which names `function` and `name`, for anything else.
PagedCache paged_cache(
    const char* function,
    const char* name,
    const TensorView& cache,
    KVAxisOrder layout,
    std::optional<int64_t> page_size
);

/// The scales of a cache: a value is the cached number, or the number of the cached code, times its
/// scales. At most one of `heads` and `tokens` is given beside `tensor`.
struct KVScale {
  double tensor = 1;                // for all of the cache; positive
  std::optional<TensorView> heads;  // float32 [num_kv_heads], positive
  /// One for each token slot and head, head_dim being 1: float32, float16 or bfloat16, of any
  /// value. For caches of codes only.
  std::optional<PagedCache> tokens;
};

/// Reads a tensor of scales: of one element (for all of the cache; float32, float16, bfloat16 or
/// float64), [num_kv_heads], or for each token slot and head in pages like those of the cache,
/// [num_pages, page_size, num_kv_heads] (NHD), [num_pages, num_kv_heads, page_size] (HND), or
/// [num_slots, num_kv_heads] with page_size. Throws std::invalid_argument, which names `function`
/// and `name`, for other shapes and dtypes.
KVScale kv_scale(
    const char* function,
    const char* name,
    const TensorView& scale,
    KVAxisOrder layout,
    int64_t page_size,
    int64_t num_kv_heads
);

/// Tensors and numbers of one layer. k, v and k_rope are of the dtype of q, or all codes of one
/// kind: float8_e4m3fn, float8_e5m2 or int8.
struct AttentionArguments {
  const char* function = "run_attention";  // named in errors
  TensorView q;                            // [num_rows, num_heads, head_dim]
  PagedCache k, v;
  KVScale k_scale, v_scale;          // k_scale is k_rope's, too
  std::optional<TensorView> q_rope;  // [num_rows, num_heads, rope_dim]: the last
  std::optional<PagedCache> k_rope;  // dimensions of q and k, stored apart
  double scale = 1;                  // multiplies q . k
  double softcap = 0;                // c > 0: c * tanh(scaled score / c)
  ScoreBias bias;
  std::optional<TensorView> sinks;  // float32 [num_heads], one more logit a row
  TensorView out;                   // [num_rows, num_heads, v_head_dim], dtype of q
  std::optional<TensorView> lse;    // float32 [num_rows, num_heads]
};

/// Head counts and dimensions as the tensors have them; head_dim includes the dimensions of
/// q_rope.
AttentionShape attention_shape(const AttentionArguments& arguments);

/// Attention over paged keys and values: for every row of every segment
///   out = softmax_j(scale * q . k_j + bias_j over the visible keys j, and the sink) v_j
/// with k_j and v_j times their scales;
///   lse = log sum_j exp(scale * q . k_j + bias_j), without the sink, natural logarithm.
/// Accumulates in float32 and rounds once; see AttentionPlan for bfloat16. Results of rows without
/// visible keys and of rows outside all segments are zeros and -inf; the latter rows are never
/// read. out and lse may not overlap an input. The result does not depend on the number of threads.
/// Throws std::invalid_argument before anything is written.
void run_attention(const AttentionPlan& plan, const AttentionArguments& arguments);

}  // namespace cpattn
