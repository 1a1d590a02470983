// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "cpattn/attention/attention_plan.h"
#include "cpattn/attention/key_visibility.h"

namespace cpattn {

/// Pages in the CSR form of FlashInfer; see page_table_from_csr.
struct CsrPages {
  std::vector<int64_t> kv_indptr, kv_indices, last_page_len;
};

/// A batch of sequences. Sequence r has q_lens[r] new tokens, consecutive rows of q, at the end of
/// its kv_lens[r] cached keys (its own new keys included), or from key first_positions[r] on.
struct SequenceBatch {
  AttentionShape shape;
  std::optional<int64_t> num_rows;  // rows of q, if they are known: must be the sum of q_lens
  std::vector<int64_t> q_lens;
  std::vector<int64_t> kv_lens;                         // unused with csr, which implies them
  std::optional<std::vector<int64_t>> first_positions;  // of new tokens among the keys
  std::optional<IndexTable> block_tables;               // exactly one of block_tables and csr
  std::optional<CsrPages> csr;
  int64_t page_size = 0;
  int64_t num_pages = 0;
  KeyVisibility visibility;
  /// Permits more queries than keys under causal: the first queries then stand before key 0 and
  /// see nothing. Has no effect with first_positions.
  bool allow_short_kv = false;
  bool batch_invariant = false;
  bool precise = false;
};

/// Plans the batch. Throws std::invalid_argument, naming `function`,
/// for negative or mismatched lengths, bad page ids, tables that are too narrow, more new
/// tokens than keys under causal, and visibility that breaks the rules of KeyVisibility.
/// num_threads 0 stands for default_num_threads() when the plan runs.
AttentionPlan plan_sequences(const char* function, const SequenceBatch& batch, int num_threads);

}  // namespace cpattn
