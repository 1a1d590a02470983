// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "cpattn/attention/paged_attention.h"
#include "cpattn/attention/sequence_batch.h"

namespace cpattn {

// Reads the calls of users of any language, and sets the defaults of arguments that they leave out.
// Each function throws std::invalid_argument, which names `function`.

/// The kind of codes that kv_dtype names: float8_e4m3fn, float8_e5m2 or int8.
std::optional<DType> parse_kv_dtype(
    const char* function, const std::optional<std::string_view>& kv_dtype
);

/// Returns the cache with elements of kv_dtype, if given: its elements must be of that type or
/// uint8. A uint8 cache needs kv_dtype.
TensorView as_codes(
    const char* function,
    const char* name,
    const TensorView& cache,
    const std::optional<DType>& kv_dtype
);

/// 1 / sqrt(head_dim). Throws above 256, where it would be wrong: absorbed MLA scales by the width
/// before absorption.
double default_scale(const char* function, int64_t head_dim);

/// Throws for a cache of int8 without the scale `name`: unscaled codes would reach 127.
[[noreturn]] void refuse_missing_scale(const char* function, const char* name);

/// A scale of a cache: a number, a tensor of numbers, or neither, which means 1.
struct GivenScale {
  std::optional<double> number;
  std::optional<TensorView> tensor;  // as kv_scale() reads it
  bool is_given() const { return number || tensor; }
};

/// Reads the scale of a cache with pages of page_size tokens.
KVScale kv_scale(
    const char* function,
    const char* name,
    const GivenScale& scale,
    KVAxisOrder layout,
    int64_t page_size,
    int64_t num_kv_heads
);

/// The tensors and numbers of a layer as the user gives them. See AttentionArguments, and
/// paged_cache() for the caches.
struct LayerCall {
  TensorView q, k_cache, v_cache;
  std::optional<TensorView> q_rope, k_rope;  // both or neither
  KVAxisOrder kv_layout = KVAxisOrder::nhd;
  std::optional<int64_t> page_size;
  std::optional<std::string_view> kv_dtype;
  GivenScale k_scale, v_scale;  // caches of int8 need both
  std::optional<double> scale;  // default_scale() of all dimensions of q
  double softcap = 0;
  ScoreBias bias;
  std::optional<TensorView> sinks;
  TensorView out;
  std::optional<TensorView> lse;
};

/// The arguments of a layer, which borrow its tensors.
AttentionArguments layer_arguments(const char* function, const LayerCall& call);

/// The CSR form of pages, or none if no part is given. If one part is given, all must be, and
/// kv_lens must not.
std::optional<CsrPages> csr_pages(
    const char* function,
    bool has_kv_lens,
    std::optional<std::vector<int64_t>> kv_indptr,
    std::optional<std::vector<int64_t>> kv_indices,
    std::optional<std::vector<int64_t>> last_page_len
);

/// Plans the batch, whose shape the tensors of the layer give, and runs the plan.
void paged_attention(
    const char* function, SequenceBatch batch, const AttentionArguments& arguments, int num_threads
);

/// Runs a plan like the other run_attention(). The caches have pages of the plan's page_size; the
/// default scale is that of the plan's head_dim.
void run_attention(const char* function, const AttentionPlan& plan, LayerCall call);

}  // namespace cpattn
