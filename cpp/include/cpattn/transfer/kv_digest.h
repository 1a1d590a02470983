// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "cpattn/transfer/held_tokens.h"
#include "cpattn/transfer/kv_layout.h"

namespace cpattn {

/// The digest of a buffer's bytes for some tokens. It depends on neither pages nor strides.
struct KVEntryDigest {
  const KVEntry* entry = nullptr;
  int64_t row_bytes = 0;  // of a token and head; of a page, if pages have no token rows
  int64_t num_rows = 0;
  std::vector<uint64_t> sums;  // of each block of positions
};

/// Digests every buffer of a layout for some tokens of one sequence. A row is the bytes of a token
/// and a head, or of a page without token rows. Its 64-bit hash depends on these bytes, on layer,
/// kind and draft flag, the head's number in the whole model, and the position of the token, for a
/// page its first. A sum adds the hashes of a block of positions modulo 2^64. Blocks have
/// `block_tokens` positions, counted from 0, and the first sum is that of the block with the first
/// token; without block_tokens there is one sum. So the digests of parts add up to that of the
/// whole.
///
/// With a `peer`, digests only what the peer also holds: the layers that both answer for, its
/// heads, and the tokens of its DCP rank. Elided buffers have no digest.
///
/// Reads memory at the layout's addresses, for which the caller vouches. Runs on at most
/// `num_threads` threads (0: default_num_threads()); the sums do not depend on their number. Throws
/// std::invalid_argument in the name of "digest" for buffers that overlap, arguments that
/// held_tokens() refuses, more than 2^28 sums, item lengths that are no whole number of rows, other
/// heads in a peer, and tokens that are not whole pages of entries without token rows.
std::vector<KVEntryDigest> digest_kv(
    const KVLayout& layout,
    const KVTokenRange& range,
    std::optional<int64_t> block_tokens = {},
    const KVLayout* peer = nullptr,
    int num_threads = 0
);

}  // namespace cpattn
