// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "cpattn/base/index_table.h"
#include "cpattn/context_parallel/context_parallel.h"
#include "cpattn/sparse/topk_transform_method.h"

namespace cpattn {

/// A sparse-attention (DSA) batch, from which its metadata is built. seq_lens are
/// cached prefix + new tokens in every mode, draft tokens included. They are at least
/// extend_lens, except in verify and draft batches, where the first rows may see nothing.
struct DsaBatch {
  using Lens = std::span<const int64_t>;

  ForwardMode forward_mode = ForwardMode::extend;  // any mode except prebuilt
  Lens seq_lens;                                   // [bs] >= 0
  std::optional<Lens> extend_lens;  // [bs]; default: 1 in decode, num_draft_tokens in others
  std::optional<int64_t> num_draft_tokens;  // of verify and draft batches
  int64_t topk = 1;
  bool fp8_kv_cache = false;
  std::string_view prefill_impl;
  int64_t page_size = 1;                        // of real_page_table
  std::optional<IndexTable> req_to_token;       // [requests, tokens] slots; none: no page tables
  std::optional<Lens> req_pool_indices;         // [bs] rows of req_to_token; default 0, 1, ...
  const ContextParallelMetadata* cp = nullptr;  // of the same batch
  std::optional<int64_t> num_rows;              // default: the rows of q, physical padding included
};

/// The integers that indexer, top-k transform and sparse attention read. n is the number of
/// sequences: under context parallelism of those with rows on this rank, else of all. T is the
/// number of rows of q. A row sees keys [0, seqlens_expanded) of its sequence. [ks, ke) and
/// topk_indices_offset count keys in the concatenation of all sequences.
struct DsaMetadata {
  using Ints = std::vector<int32_t>;

  ForwardMode forward_mode = ForwardMode::extend;
  TopkTransformMethod topk_transform_method = TopkTransformMethod::paged;
  int32_t topk = 0;
  int32_t page_size = 0;
  int32_t max_seqlen_q = 0;
  int32_t max_seqlen_k = 0;

  Ints bs_idx;                       // [n] index of each sequence in the batch
  Ints extend_lens;                  // [n] rows of each sequence here
  Ints cache_seqlens;                // [n] seq_lens of each sequence
  std::optional<Ints> cu_seqlens_q;  // [n + 1]; none where rows of a sequence lie apart (zigzag)
  Ints cu_seqlens_k;                 // [n + 1]
  Ints seqlens_expanded;             // [T]; below 1 in verify: the row sees nothing
  Ints token_to_batch_idx;           // [T] into the n sequences
  Ints ks, ke;                       // [T] the keys that a row sees
  Ints dsa_cache_seqlens;            // [num_rows] seqlens_expanded within [0, topk]; 0 in padding
  std::optional<Ints> dsa_cu_seqlens_k;     // [num_rows + 1]; none where it passes int32
  std::optional<Ints> topk_indices_offset;  // [T] the first key of the row's sequence; if RAGGED
  std::optional<Ints> page_table_1;         // [n, max_seqlen_k] slots
  std::optional<Ints> real_page_table;      // [n, ceil(max_seqlen_k / page_size)] pages
  /// [cu_seqlens_k[n]] the slots of all sequences, one after the other. Only if RAGGED, and if the
  /// new tokens of the batch are not all the keys: there is a prefix, or a sequence without rows.
  std::optional<Ints> page_table_1_flattened;

  bool operator==(const DsaMetadata&) const = default;
};

/// The metadata of a batch. Throws std::invalid_argument, which names argument, index and value,
/// for a batch that breaks the rules of DsaBatch, a `cp` that was built for another batch, and sums
/// that exceed int32.
DsaMetadata build_dsa_metadata(const DsaBatch& batch);

/// The numbers that determine a DsaMetadata: enough to store it and make it again.
struct DsaMetadataState {
  using Lens = std::vector<int64_t>;

  ForwardMode forward_mode = ForwardMode::extend;
  TopkTransformMethod topk_transform_method = TopkTransformMethod::paged;
  int64_t topk = 0;
  int64_t page_size = 0;
  Lens bs_idx, cache_seqlens;                 // [n]
  Lens token_to_batch_idx, seqlens_expanded;  // [T]
  int64_t num_rows = 0;
  std::optional<Lens> page_table_1;  // [n, max_seqlen_k]
  bool has_flattened = false;        // page_table_1_flattened
};

/// The state of metadata.
DsaMetadataState state_of(const DsaMetadata& metadata);

/// The metadata that a state determines. Throws std::invalid_argument for a state that no metadata
/// has.
DsaMetadata metadata_of(const DsaMetadataState& state);

}  // namespace cpattn
