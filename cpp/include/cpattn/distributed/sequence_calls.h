// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "cpattn/base/key_window.h"
#include "cpattn/distributed/key_share.h"

namespace cpattn {

/// Queries, by their request and their position within it. Positions from the length of a request
/// on are those of padding tokens, which see what its last token sees.
struct QueryRows {
  std::span<const int64_t> request, position;
};

/// A mask of new tokens: for each request rows of `row_bits` flags, the first for the token at
/// `first_position`, a flag for each key. Bit k of byte b is flag 8 b + k; requests begin with a
/// byte.
struct RowMask {
  std::span<const uint8_t> bits;
  std::span<const int64_t> first_byte, row_bits, first_position;  // [bs]
};

/// Keys that a row sees, by their positions: all, or those up to its own, and of these the ones in
/// its window. A mask hides some of them.
struct RowVisibility {
  bool causal = true;
  std::optional<KeyWindow> window;
  std::optional<RowMask> mask;
};

/// One call of attention: sequences of q_lens[i] rows over the keys in the pages of kv_indptr.
struct SequenceCall {
  std::vector<int64_t> rows;  // which of the queries, sequence after sequence
  std::vector<int64_t> q_lens, kv_indptr, kv_indices, last_page_len;
  std::vector<int64_t> requests, first_key;  // of each sequence; the first key among its request's
  bool causal = false;                       // the last row of a sequence sees all its keys
  std::optional<std::vector<uint8_t>>
      mask;  // flags of rows and keys; a sequence begins with a byte
};

/// The calls that compute rows over the keys of a share, which are in `pages` in their order. A row
/// is in one of them, or in none where it sees no key.
///
/// Keys of a share are no consecutive positions, but in ascending order; so a causal row sees the
/// first c of them. Rows of which each sees one key more than the one before are a causal sequence,
/// whoever computes them; rows that see the same keys are a sequence that is not causal. A row of
/// either kind reads no key that it does not see. Windows and masks have no such form: there rows
/// go in blocks, with a mask of the keys between the first and the last that one of them sees.
///
/// Throws std::invalid_argument for rows of no request or below position 0, a window below 0, and
/// pages or a mask without what the rows see.
std::vector<SequenceCall> sequence_calls(
    const KeyShare& share,
    const LocalPages& pages,
    const QueryRows& rows,
    const RowVisibility& visibility
);

}  // namespace cpattn
