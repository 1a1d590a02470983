// SPDX-License-Identifier: Apache-2.0
#include "ops/npu/token_sequences.h"

#include <limits>

#include "cpattn/base/check.h"
#include "cpattn/base/prefix_sums.h"

namespace cpattn {

void check_layouts(
    const char* function,
    std::string_view query_layout,
    const char* key_layout_name,
    std::string_view key_layout,
    bool has_block_table
) {
  check(
      query_layout == "BSND" || query_layout == "TND", function,
      ": layout_query must be 'BSND' or 'TND', got '", query_layout, "'"
  );
  check(
      key_layout == query_layout || key_layout == "PA_BSND", function, ": ", key_layout_name,
      " must be layout_query or 'PA_BSND', got '", key_layout, "' with '", query_layout, "'"
  );
  check(
      has_block_table == (key_layout == "PA_BSND"), function, ": block_table must be given with ",
      key_layout_name, " 'PA_BSND' and only with it, got ", key_layout_name, " '", key_layout, "'"
  );
}

void check_window(
    const char* function, int64_t sparse_mode, int64_t pre_tokens, int64_t next_tokens
) {
  constexpr int64_t kNoLimit = std::numeric_limits<int64_t>::max();
  check(
      sparse_mode == 0 || sparse_mode == 3, function, ": sparse_mode must be 0 or 3, got ",
      sparse_mode
  );
  check(
      pre_tokens == kNoLimit && next_tokens == kNoLimit, function,
      ": pre_tokens and next_tokens must be 2**63 - 1, got ", pre_tokens, " and ", next_tokens
  );
}

TokenSequences packed_sequences(
    const char* function, const char* name, const SequenceLengths& sums, int64_t total
) {
  check(sums.has_value(), function, ": ", name, " is mandatory for TND");
  check_prefix_sums(
      function, name, *sums, {.total = total, .total_name = "the number of packed tokens"}
  );
  TokenSequences sequences;
  int64_t end = 0;
  for (const int64_t sum : *sums) {
    sequences.begins.push_back(end);
    sequences.lens.push_back(sum - end);
    end = sum;
  }
  return sequences;
}

TokenSequences padded_sequences(
    const char* function,
    const char* name,
    const SequenceLengths& lengths,
    int64_t batch,
    int64_t limit
) {
  TokenSequences sequences{.lens = lengths.value_or(std::vector<int64_t>(batch, limit))};
  check(
      sequences.size() == batch, function, ": ", name, " must have one entry per sequence (", batch,
      "), got ", sequences.size()
  );
  for (int64_t b = 0; b < batch; ++b) {
    check(
        sequences.lens[b] >= 0 && sequences.lens[b] <= limit, function, ": ", name,
        " must be in [0, ", limit, "], got ", sequences.lens[b], " at index ", b
    );
    sequences.begins.push_back(b * limit);
  }
  return sequences;
}

}  // namespace cpattn
