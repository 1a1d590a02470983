// SPDX-License-Identifier: Apache-2.0
// Page-table slots of indices that are already selected, without scores.
#include <algorithm>
#include <vector>

#include "cpattn/base/check.h"
#include "cpattn/sparse/topk.h"
#include "ops/base/tensor_checks.h"
#include "ops/sparse/slot_rows.h"

namespace cpattn {
namespace {

void write_slots(
    const char* function,
    const SlotTable& table,
    std::span<const int64_t> table_rows,
    const IndexTable& indices,
    const TensorView& out
) {
  check_dtype(function, "out", out.dtype, DType::int32);
  check_rows(function, "out", out, {indices.rows, indices.columns});
  check_no_overlap(function, "out", out, "topk_indices", view_of(indices));
  check_no_overlap(function, "out", out, "page_table", view_of(table.pages));
  const SlotRows rows(function, table, table_rows);
  for (int64_t i = 0; i < indices.rows; ++i) {
    int32_t* slots = out.as<int32_t>() + i * out.strides[0];
    for (int64_t j = 0; j < indices.columns; ++j) {
      const int64_t index = indices.at(i, j);
      check(
          index <= INT32_MAX, function, ": topk_indices must fit into int32, got ", index, " at [",
          i, ", ", j, "]"
      );
      slots[j] = static_cast<int32_t>(std::max<int64_t>(index, -1));
    }
    rows.replace(i, slots, indices.columns);
  }
}

}  // namespace

void transform_index_page_table_decode(
    const SlotTable& table, const IndexTable& indices, const TensorView& out
) {
  constexpr char kFunction[] = "transform_index_page_table_decode";
  check(
      table.pages.rows == indices.rows, kFunction, ": page_table must have one row per row of ",
      "topk_indices, ", indices.rows, ", got ", table.pages.rows
  );
  write_slots(kFunction, table, one_row_each(indices.rows), indices, out);
}

void transform_index_page_table_prefill(
    const SlotTable& table,
    const IndexTable& indices,
    std::span<const int64_t> extend_lens,
    const TensorView& out
) {
  constexpr char kFunction[] = "transform_index_page_table_prefill";
  const auto num_sequences = static_cast<int64_t>(extend_lens.size());
  check(
      num_sequences == table.pages.rows, kFunction, ": extend_lens_cpu must have one element per ",
      "row of page_table, ", table.pages.rows, ", got ", num_sequences
  );
  std::vector<int64_t> rows;
  for (int64_t s = 0; s < num_sequences; ++s) {
    const int64_t left = indices.rows - static_cast<int64_t>(rows.size());
    check(
        extend_lens[s] >= 0 && extend_lens[s] <= left, kFunction, ": extend_lens_cpu must be >= 0 ",
        "and add up to the rows of topk_indices, ", indices.rows, ", got ", extend_lens[s],
        " at index ", s
    );
    rows.resize(rows.size() + extend_lens[s], s);
  }
  check(
      static_cast<int64_t>(rows.size()) == indices.rows, kFunction,
      ": extend_lens_cpu must add up ", "to the rows of topk_indices, ", indices.rows, ", got ",
      rows.size()
  );
  write_slots(kFunction, table, rows, indices, out);
}

void page_table_to_topk(
    const SlotTable& table, std::span<const int64_t> lengths, const TensorView& out
) {
  constexpr char kFunction[] = "page_table_to_topk";
  check_dtype(kFunction, "out", out.dtype, DType::int32);
  check_tensor(kFunction, "out", out, 2);
  check_no_overlap(kFunction, "out", out, "page_table", view_of(table.pages));
  const int64_t num_rows = out.shape[0], topk = out.shape[1];
  const auto num_lengths = static_cast<int64_t>(lengths.size());
  check(
      num_lengths == table.pages.rows, kFunction, ": lengths must have one element per row of ",
      "page_table, ", table.pages.rows, ", got ", num_lengths
  );
  check(
      num_lengths <= num_rows, kFunction, ": num_rows must be at least that of page_table, ",
      num_lengths, ", got ", num_rows
  );
  const std::vector<int64_t> table_rows = one_row_each(num_lengths);
  const SlotRows rows(kFunction, table, table_rows);
  for (int64_t i = 0; i < num_rows; ++i) {
    const int64_t length = i < num_lengths ? std::clamp<int64_t>(lengths[i], 0, topk) : 0;
    int32_t* slots = out.as<int32_t>() + i * out.strides[0];
    write_all_indices(length, topk, slots);
    if (length > 0) rows.replace(i, slots, length);
  }
}

}  // namespace cpattn
