// SPDX-License-Identifier: Apache-2.0
#include "cpattn/kv/page_rows.h"

#include <algorithm>
#include <cassert>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "cpattn/base/check.h"
#include "cpattn/base/parallel.h"
#include "ops/base/tensor_checks.h"
#include "ops/kv/row_writer.h"
#include "ops/kv/slots.h"

namespace cpattn {
namespace {

/// One part, checked.
class PageWriter {
 public:
  PageWriter(const char* function, int64_t num_rows, const PageRows& part)
      : cast_(row_cast(function, part.name, part.rows.dtype, part.pages_name, part.pages.dtype)),
        scale_(static_cast<float>(part.scale)),
        rows_(part.rows),
        pages_(part.pages),
        from_bytes_(element_size(rows_.dtype)),
        to_bytes_(element_size(pages_.dtype)) {
    check_tensor(function, part.pages_name, pages_, 4);
    check_rows(function, part.name, rows_, {num_rows, pages_.dim(1), pages_.dim(3)});
    check_scale(function, part.scale_name, part.scale);
  }

  /// Bytes written and read for a row.
  int64_t traffic() const { return pages_.dim(1) * pages_.dim(3) * (from_bytes_ + to_bytes_); }

  void write(int64_t row, int64_t slot) const {
    const int64_t page = slot / pages_.dim(2), offset = slot % pages_.dim(2), dim = pages_.dim(3);
    const char* from = rows_.as<char>() + row * rows_.stride(0) * from_bytes_;
    char* to =
        pages_.as<char>() + (page * pages_.stride(0) + offset * pages_.stride(2)) * to_bytes_;
    for (int64_t head = 0; head < pages_.dim(1); ++head) {
      if (cast_ == nullptr) {
        std::memcpy(to, from, dim * to_bytes_);
      } else {
        cast_(from, dim, scale_, to);
      }
      from += rows_.stride(1) * from_bytes_;
      to += pages_.stride(1) * to_bytes_;
    }
  }

 private:
  RowCast cast_;  // null: rows are copied
  float scale_;
  TensorView rows_, pages_;
  int64_t from_bytes_, to_bytes_;
};

}  // namespace

TensorView heads_first(TensorView pages, KVAxisOrder order) {
  if (pages.rank == 3) {
    pages.shape = {pages.shape[0], pages.shape[1], 1, pages.shape[2]};
    pages.strides = {pages.strides[0], pages.strides[1], pages.strides[1], pages.strides[2]};
    pages.rank = 4;
  } else if (pages.rank == 4 && order == KVAxisOrder::nhd) {
    std::swap(pages.shape[1], pages.shape[2]);
    std::swap(pages.strides[1], pages.strides[2]);
  }
  return pages;
}

void write_page_rows(
    const char* function, std::span<int64_t> slots, std::span<const PageRows> parts
) {
  constexpr int64_t kLeastTraffic = int64_t{1} << 18;  // worth a thread
  assert(!parts.empty());
  const auto num_rows = static_cast<int64_t>(slots.size());
  std::vector<PageWriter> writers;
  writers.reserve(parts.size());
  int64_t traffic = 1;
  for (const PageRows& part : parts) {
    traffic += writers.emplace_back(function, num_rows, part).traffic();
    for (const PageRows& read : parts) {
      check_no_overlap(function, part.pages_name, part.pages, read.name, read.rows);
    }
    check(
        part.pages.dim(0) == parts[0].pages.dim(0) && part.pages.dim(2) == parts[0].pages.dim(2),
        function, ": ", part.pages_name, " must have as many pages and slots in each as ",
        parts[0].pages_name, ", ", parts[0].pages.dim(0), " of ", parts[0].pages.dim(2), ", got ",
        part.pages.dim(0), " of ", part.pages.dim(2)
    );
  }
  const TensorView& pages = parts[0].pages;
  const bool ascending = check_slots(function, "slots", slots, pages.dim(0) * pages.dim(2));
  const int64_t step = std::max<int64_t>(1, kLeastTraffic / traffic);
  if (num_rows > step && !ascending) keep_last(function, slots);
  parallel_for((num_rows + step - 1) / step, default_num_threads(), [&](int64_t item, StopToken&) {
    const int64_t end = std::min(num_rows, (item + 1) * step);
    for (const PageWriter& writer : writers) {
      for (int64_t row = item * step; row < end; ++row) {
        if (slots[row] >= 0) writer.write(row, slots[row]);
      }
    }
  });
}

}  // namespace cpattn
