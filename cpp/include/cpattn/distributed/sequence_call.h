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
/// on belong to padding tokens, which see what the request's last token sees.
struct QueryRows {
  std::span<const int64_t> request, position;
};

/// A mask of new tokens: for each request rows of `row_bits` flags, the first for the token at
/// `first_position`, a flag for each key. Bit k of byte b is flag 8 b + k; each request begins at a
/// new byte.
struct RowMask {
  std::span<const uint8_t> bits;
  std::span<const int64_t> first_byte, row_bits, first_position;  // [bs]
};

/// The keys that a row sees, by their positions: all or, if causal, those up to its own. A window
/// and a mask hide further keys.
struct RowVisibility {
  bool causal = true;
  std::optional<KeyWindow> window;
  std::optional<RowMask> mask;
};

/// A call of attention: sequences of q_lens[i] rows over the keys in the pages of kv_indptr.
struct SequenceCall {
  std::vector<int64_t> rows;  // indices of the queries, sequence after sequence
  std::vector<int64_t> q_lens, kv_indptr, kv_indices, last_page_len;
  std::vector<int64_t> requests, first_key;  // of each sequence; the first key among its request's
  /// The keys of its sequence that each row sees, as KeyVisibility has them; none with a mask.
  std::optional<std::vector<int64_t>> key_ranges;
  /// Flags of rows and keys; each sequence begins at a new byte.
  std::optional<std::vector<uint8_t>> mask;
};

/// The call that computes rows over the keys of a share, which `pages` hold in order; none if no
/// row sees a key. A row that sees no key is left out.
///
/// Positions of a share's keys ascend, but need not be consecutive; so causality and a window show
/// a row a range of keys. The rows of a request are a sequence, in the order of their positions,
/// whatever rank computes them: the kernels then pack the keys once for many rows. Rows with a mask
/// go in blocks, with flags of the keys from the first to the last that a row of the block sees.
///
/// Throws std::invalid_argument for rows of no request or below position 0, a window below 0, and
/// pages or a mask that lack keys which the rows see.
std::optional<SequenceCall> sequence_call(
    const KeyShare& share,
    const LocalPages& pages,
    const QueryRows& rows,
    const RowVisibility& visibility
);

}  // namespace cpattn
