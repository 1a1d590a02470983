// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "cpattn/sparse/dsa_metadata.h"

namespace cpattn {

// These functions fill a DsaMetadata, in this order. forward_mode, topk_transform_method, topk and
// page_size have been set.

/// Fills the fields of sequences, and token_to_batch_idx. `requests` has the sequence of each row;
/// with `keep_all` sequences without rows stay.
void select_sequences(
    DsaMetadata& out, const std::vector<int32_t>& requests, DsaBatch::Lens seq_lens, bool keep_all
);

/// Fills the fields of rows. `lengths` has the keys that each row sees; num_rows counts padding.
void fill_rows(DsaMetadata& out, std::vector<int32_t> lengths, int64_t num_rows);

/// Fills page_table_1 and real_page_table. Throws std::invalid_argument for a req_to_token that
/// does not have the pages of the batch.
void fill_page_tables(DsaMetadata& out, const DsaBatch& batch);

/// Fills page_table_1_flattened.
std::vector<int32_t> flattened(const DsaMetadata& metadata);

}  // namespace cpattn
