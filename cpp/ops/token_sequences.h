// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace cpattn {

/// Where sequences begin in a row of tokens, and how long they are.
struct TokenSequences {
  std::vector<int64_t> begins, lens;
  int64_t size() const { return static_cast<int64_t>(lens.size()); }
};

using SequenceLengths = std::optional<std::vector<int64_t>>;

/// Sequences that follow each other, from the running sums of their lengths, up to
/// `total`. Throws std::invalid_argument in the name of `function`.
TokenSequences packed_sequences(
    const char* function, const char* name, const SequenceLengths& sums, int64_t total
);

/// `batch` sequences of at most `limit` tokens, which is also where the next begins;
/// all of them if there are no lengths.
TokenSequences padded_sequences(
    const char* function,
    const char* name,
    const SequenceLengths& lengths,
    int64_t batch,
    int64_t limit
);

}  // namespace cpattn
