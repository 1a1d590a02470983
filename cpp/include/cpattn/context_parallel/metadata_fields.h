// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "cpattn/context_parallel/context_parallel.h"

namespace cpattn {

// The fields of ContextParallelMetadata under the engines' names, for all bindings.

/// A field that is stored.
struct CpArrayField {
  const char* name;
  ContextParallelMetadata::Ints ContextParallelMetadata::* values;
};

/// A field that is computed on each access.
struct CpComputedField {
  const char* name;
  std::vector<int32_t> (*compute)(const ContextParallelMetadata&);
};

struct CpIntField {
  const char* name;
  int32_t ContextParallelMetadata::* value;
};

inline constexpr CpArrayField kCpLists[] = {
    {"prefix_lens", &ContextParallelMetadata::prefix_lens},
    {"per_rank_actual_token", &ContextParallelMetadata::per_rank_actual_token},
    {"per_rank_logical_token", &ContextParallelMetadata::per_rank_logical_token},
    {"max_rank_len", &ContextParallelMetadata::max_rank_len},
    {"zigzag_index", &ContextParallelMetadata::zigzag_index},
    {"kv_len_prev_list", &ContextParallelMetadata::kv_len_prev},
    {"kv_len_next_list", &ContextParallelMetadata::kv_len_next},
    {"actual_seq_q_prev_list", &ContextParallelMetadata::actual_seq_q_prev},
    {"actual_seq_q_next_list", &ContextParallelMetadata::actual_seq_q_next},
};

inline constexpr CpComputedField kCpLayouts[] = {
    {"split_list", &split_list},
    {"cp_reverse_index", &cp_reverse_index},
    {"reverse_split_len", &reverse_split_len},
};

inline constexpr CpArrayField kCpTensors[] = {
    {"kv_len_prev_tensor", &ContextParallelMetadata::kv_len_prev},
    {"kv_len_next_tensor", &ContextParallelMetadata::kv_len_next},
    {"kv_len_combined_tensor", &ContextParallelMetadata::kv_len_combined},
    {"actual_seq_q_prev_tensor", &ContextParallelMetadata::actual_seq_q_prev},
    {"actual_seq_q_next_tensor", &ContextParallelMetadata::actual_seq_q_next},
    {"actual_seq_q_combined_tensor", &ContextParallelMetadata::actual_seq_q_combined},
    {"cu_seqlens_q_prev_tensor", &ContextParallelMetadata::cu_seqlens_q_prev},
    {"cu_seqlens_q_next_tensor", &ContextParallelMetadata::cu_seqlens_q_next},
    {"cu_seqlens_q_combined_tensor", &ContextParallelMetadata::cu_seqlens_q_combined},
    {"cu_seqlens_kv_prev_tensor", &ContextParallelMetadata::cu_seqlens_kv_prev},
    {"cu_seqlens_kv_next_tensor", &ContextParallelMetadata::cu_seqlens_kv_next},
    {"cu_seqlens_kv_combined_tensor", &ContextParallelMetadata::cu_seqlens_kv_combined},
};

inline constexpr CpIntField kCpInts[] = {
    {"cp_rank", &ContextParallelMetadata::cp_rank},
    {"cp_size", &ContextParallelMetadata::cp_size},
    {"bs", &ContextParallelMetadata::bs},
    {"total_seq_lens", &ContextParallelMetadata::total_seq_lens},
    {"total_q_prev_tokens", &ContextParallelMetadata::total_q_prev_tokens},
    {"total_q_next_tokens", &ContextParallelMetadata::total_q_next_tokens},
    {"max_seqlen_q_prev", &ContextParallelMetadata::max_seqlen_q_prev},
    {"max_seqlen_q_next", &ContextParallelMetadata::max_seqlen_q_next},
};

/// The values of a tensor field. The contiguous strategy has empty "next" lists, but [0] for
/// tensors.
inline ContextParallelMetadata::Ints cp_tensor_values(
    const ContextParallelMetadata& metadata, const CpArrayField& field
) {
  const ContextParallelMetadata::Ints values = metadata.*field.values;
  const bool none_but_present = values.empty() && values.data() != nullptr;
  return none_but_present ? metadata.cu_seqlens_q_next : values;
}

}  // namespace cpattn
