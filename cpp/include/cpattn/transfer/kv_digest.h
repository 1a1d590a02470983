// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "cpattn/transfer/held_tokens.h"
#include "cpattn/transfer/kv_layout.h"

namespace cpattn {

/// The digest of what a buffer holds of some tokens, which depends on neither pages nor strides.
struct KVEntryDigest {
  const KVEntry* entry = nullptr;
  int64_t row_bytes = 0;  // of a token and head; of a page, if pages are no rows of tokens
  int64_t num_rows = 0;
  std::vector<uint64_t> sums;  // of each block of positions
};

/// Digests every buffer of a layout for some tokens of one sequence. A row is the bytes of a token
/// and a head, or of a page that is not made of rows; its hash of 64 bits depends on these, on
/// layer, kind and draft flag, the head among those of the whole model, and the position of the
/// token, the first one of a page. A sum has the hashes of a block of positions, modulo 2^64:
/// positions of `block_tokens` from 0 on, the first block that with the first token; one for all
/// if there is no such number. So the digests of parts add up to that of the whole.
///
/// With a `peer` only what it holds, too: the layers that both answer for, heads, and tokens of its
/// DCP rank. Buffers that are left out have none.
///
/// Reads memory at the layout's addresses: the caller answers for them. At most `num_threads`
/// threads, 0 for default_num_threads(), and the same sums for any. Throws std::invalid_argument in
/// the name of "digest" for buffers that overlap, what held_tokens() refuses, more than 2^28 sums,
/// item lengths that are no whole number of rows, other heads in a peer, and tokens that are not
/// whole pages where pages are no rows.
std::vector<KVEntryDigest> digest_kv(
    const KVLayout& layout,
    const KVTokenRange& range,
    std::optional<int64_t> block_tokens = {},
    const KVLayout* peer = nullptr,
    int num_threads = 0
);

}  // namespace cpattn
