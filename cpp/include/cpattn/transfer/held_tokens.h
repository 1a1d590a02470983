// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "cpattn/transfer/index_range.h"
#include "cpattn/transfer/kv_layout.h"

namespace cpattn {

/// Tokens that are consecutive in a sequence and in the pages of a side.
struct HeldTokens {
  int64_t token = 0;  // the first one's position in the sequence
  int64_t slot = 0;   // page * page_size + row, of this side's own pages
  int64_t count = 0;

  bool operator==(const HeldTokens&) const = default;
};

/// The pages of a sequence, and a range of its tokens.
struct KVTokenRange {
  std::span<const int64_t> pages;
  int64_t start = 0;                   // the token of row 0 of the first page
  std::optional<int64_t> first_token;  // none: `start`
  std::optional<int64_t> num_tokens;   // none: all up to the end of the pages
};

/// The tokens of a range. Throws std::invalid_argument, which names `function`, for numbers that
/// are negative or above 2^48, a start that begins no page, tokens that the pages have no room
/// for, and DCP without num_tokens.
IndexRange tokens_of(const char* function, const KVLayout& layout, const KVTokenRange& range);

/// Returns the tokens that a side holds, in ascending slots: all, or the share of its DCP rank or
/// of its striped pages. With a `peer`, only tokens that the peer also holds; its pages are not
/// striped. Throws std::invalid_argument, which names `function`, like tokens_of(), for pages
/// outside an entry, and for a page in two places.
std::vector<HeldTokens> held_tokens(
    const char* function,
    const KVLayout& layout,
    const KVTokenRange& range,
    const KVLayout* peer = nullptr
);

}  // namespace cpattn
