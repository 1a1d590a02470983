// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <iterator>
#include <utility>
#include <vector>

#include "cpattn/base/check.h"
#include "cpattn/distributed/sequence_call.h"

namespace cpattn {

inline constexpr CheckFor check_call("sequence_call");

/// A row, and the keys [first, last) of a share that causality and window let it see.
struct SeenRow {
  int64_t request, position, row, first, last;
};

/// Makes a call out of sequences.
class CallBuilder {
 public:
  explicit CallBuilder(const LocalPages& pages) : pages_(pages) { call_.kv_indptr.push_back(0); }

  void add_row(const SeenRow& row) { call_.rows.push_back(row.row); }

  /// Ends the sequence of the rows added since the last one, over the keys [first, last) of its
  /// request; `first` begins a page.
  void end_sequence(int64_t request, int64_t first, int64_t last) {
    const int64_t size = pages_.page_size;
    const int64_t begin = pages_.indptr[request] + first / size;
    const int64_t end = pages_.indptr[request] + (last + size - 1) / size;
    check_call(
        end <= pages_.indptr[request + 1], "pages must have the ", last, " keys of request ",
        request
    );
    // Reserved once, because a growing list would touch new memory again and again.
    if (call_.q_lens.empty()) call_.kv_indices.reserve(pages_.ids.size());
    call_.q_lens.push_back(std::ssize(call_.rows) - num_rows_);
    num_rows_ = std::ssize(call_.rows);
    const auto ids = pages_.ids.begin();
    call_.kv_indices.insert(call_.kv_indices.end(), ids + begin, ids + end);
    call_.kv_indptr.push_back(std::ssize(call_.kv_indices));
    call_.last_page_len.push_back((last - 1) % size + 1);
    call_.requests.push_back(request);
    call_.first_key.push_back(first);
  }

  SequenceCall finish() { return std::move(call_); }

 private:
  const LocalPages& pages_;
  SequenceCall call_;
  int64_t num_rows_ = 0;  // of the sequences before
};

/// The call of rows in the order of request and position, by blocks with masks.
SequenceCall masked_call(
    const KeyShare& share,
    const LocalPages& pages,
    const std::vector<SeenRow>& rows,
    const RowMask& mask
);

}  // namespace cpattn
