// SPDX-License-Identifier: Apache-2.0
#pragma once

// torch_npu's operators of sparse attention share these checks of layouts and limits, and the
// division of tokens into sequences.
#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

namespace cpattn {

/// Queries and keys are BSND or TND; only with a block table keys are PA_BSND, in pages.
/// key_layout_name is the operator's name for the layout of keys. All functions here throw
/// std::invalid_argument in the name of `function`.
void check_layouts(
    const char* function,
    std::string_view query_layout,
    const char* key_layout_name,
    std::string_view key_layout,
    bool has_block_table
);

/// Queries see all keys (sparse_mode 0) or keys up to their own position (3); the two other limits
/// must have their largest value.
void check_window(
    const char* function, int64_t sparse_mode, int64_t pre_tokens, int64_t next_tokens
);

/// The beginnings of sequences in a row of tokens, and their lengths.
struct TokenSequences {
  std::vector<int64_t> begins, lens;
  int64_t size() const { return static_cast<int64_t>(lens.size()); }
};

using SequenceLengths = std::optional<std::vector<int64_t>>;

/// Sequences that follow each other, from the running sums of their lengths, up to
/// `total`.
TokenSequences packed_sequences(
    const char* function, const char* name, const SequenceLengths& sums, int64_t total
);

/// `batch` sequences of at most `limit` tokens, which begin `limit` tokens apart; without lengths
/// all have `limit`.
TokenSequences padded_sequences(
    const char* function,
    const char* name,
    const SequenceLengths& lengths,
    int64_t batch,
    int64_t limit
);

}  // namespace cpattn
