// SPDX-License-Identifier: Apache-2.0
#include "cpattn/sparse/topk.h"

#include <algorithm>
#include <stdexcept>
#include <vector>

#include "cpattn/base/check.h"
#include "cpattn/base/parallel.h"
#include "cpattn/base/trace.h"
#include "ops/base/kernel_table.h"
#include "ops/base/tensor_checks.h"
#include "ops/sparse/slot_rows.h"

namespace cpattn {
namespace {

/// Scores that make another thread worth waking.
constexpr int64_t kScoresPerThread = int64_t{1} << 16;

void check_size(const char* function, const char* name, std::size_t size, int64_t rows) {
  check(
      static_cast<int64_t>(size) == rows, function, ": ", name,
      " must have one element per row of ", "score, ", rows, ", got ", size
  );
}

void check_arguments(const TopkArguments& arguments) {
  const char* function = arguments.function;
  const TensorView& score = arguments.score;
  check_dtype(function, arguments.score_name, score.dtype, DType::float32);
  check_tensor(function, arguments.score_name, score, 2);
  check(
      arguments.topk >= 1 && arguments.topk <= kMaxTopk, function, ": topk must be in [1, ",
      kMaxTopk, "], got ", arguments.topk
  );
  const int64_t columns = score.shape[1];
  check(
      columns <= INT32_MAX, function, ": ", arguments.score_name, " must have at most ", INT32_MAX,
      " columns, got ", columns
  );
  check_size(function, "lengths", arguments.lengths.size(), score.shape[0]);
  if (arguments.row_starts) {
    check_size(function, "row_starts", arguments.row_starts->size(), score.shape[0]);
  }
  for (int64_t i = 0; i < score.shape[0]; ++i) {
    const int64_t start = arguments.row_starts ? (*arguments.row_starts)[i] : 0;
    check(
        start >= 0 && start <= columns, function, ": row_starts must be in [0, ", columns,
        "], got ", start, " at index ", i
    );
    check(
        arguments.lengths[i] <= columns - start, function,
        ": row_starts + lengths must be at most ", "the number of columns, ", columns, ", got ",
        start, " + ", arguments.lengths[i], " at index ", i
    );
  }
}

int useful_threads(const TopkArguments& arguments) {
  int64_t work = 0;
  for (int64_t length : arguments.lengths) work += std::max<int64_t>(length, arguments.topk);
  return static_cast<int>(std::min<int64_t>(default_num_threads(), 1 + work / kScoresPerThread));
}

/// Selects in every row, and lets transform(i, indices, n) change its n selected indices.
template <class Transform>
void select_rows(
    const TopkArguments& arguments, const TensorView& out, const Transform& transform
) {
  check_dtype(arguments.function, "out", out.dtype, DType::int32);
  check_rows(arguments.function, "out", out, {arguments.score.shape[0], arguments.topk});
  check_no_overlap(arguments.function, "out", out, arguments.score_name, arguments.score);
  const TraceSpan span(TraceScope::call, 0, DType::float32, arguments.function);
  const kernels::TopkKernel& kernel = active_sparse_kernels().topk;
  const int64_t topk = arguments.topk;
  const TensorView& score = arguments.score;
  const auto select = [&](int64_t i, StopToken&) {
    const int64_t length = std::max<int64_t>(arguments.lengths[i], 0);
    int32_t* indices = out.as<int32_t>() + i * out.strides[0];
    if (length <= topk) {
      write_all_indices(length, topk, indices);
    } else {
      const int64_t start = arguments.row_starts ? (*arguments.row_starts)[i] : 0;
      const kernels::TopkRow row = {
          .scores = score.as<float>() + i * score.strides[0] + start,
          .length = static_cast<int32_t>(length),
          .topk = static_cast<int32_t>(topk),
          .sorted = arguments.sorted,
          .out = indices,
      };
      kernel.select(&row, thread_scratch(arguments.function, kernel.scratch_bytes(row.topk)));
    }
    transform(i, indices, std::min(length, topk));
  };
  parallel_for(score.shape[0], useful_threads(arguments), select);
}

/// The row of the table that each row of score reads.
std::vector<int64_t> rows_of_table(const char* function, const TopkSlots& slots, int64_t num_rows) {
  const int64_t height = slots.table.pages.rows;
  std::vector<int64_t> sequences;
  if (slots.batch_idx_list) {
    sequences.assign(slots.batch_idx_list->begin(), slots.batch_idx_list->end());
    for (std::size_t i = 0; i < sequences.size(); ++i) {
      check(
          sequences[i] >= 0 && sequences[i] < height, function, ": batch_idx_list must be rows of ",
          "the page table, in [0, ", height, "), got ", sequences[i], " at index ", i
      );
    }
  } else {
    sequences = one_row_each(height);
  }
  const auto num_sequences = static_cast<int64_t>(sequences.size());
  if (!slots.cu_seqlens_q) {
    check(
        num_sequences == num_rows, function, ": without cu_seqlens_q there must be a row of the ",
        "page table, or of batch_idx_list, per row of score, ", num_rows, ", got ", num_sequences
    );
    return sequences;
  }
  std::vector<int64_t> rows =
      expand_indptr(function, "cu_seqlens_q", *slots.cu_seqlens_q, num_sequences, num_rows);
  for (int64_t& row : rows) row = sequences[row];
  return rows;
}

}  // namespace

void fast_topk(const TopkArguments& arguments, const TensorView& indices) {
  check_arguments(arguments);
  select_rows(arguments, indices, [](int64_t, int32_t*, int64_t) {});
}

void fast_topk_transform_fused(
    const TopkArguments& arguments, const TopkSlots& slots, const TensorView& out
) {
  check_arguments(arguments);
  const int64_t num_rows = arguments.score.shape[0];
  const std::vector<int64_t> table_rows = rows_of_table(arguments.function, slots, num_rows);
  const SlotRows rows(arguments.function, slots.table, table_rows);
  for (int64_t i = 0; i < num_rows; ++i) rows.check_length(i, arguments.lengths[i]);
  check_no_overlap(arguments.function, "out", out, "page_table", view_of(slots.table.pages));
  select_rows(arguments, out, [&rows](int64_t i, int32_t* indices, int64_t n) {
    rows.replace(i, indices, n);
  });
}

void fast_topk_transform_ragged_fused(
    const TopkArguments& arguments, std::span<const int64_t> offsets, const TensorView& out
) {
  check_arguments(arguments);
  check_size(arguments.function, "topk_indices_offset", offsets.size(), arguments.score.shape[0]);
  for (std::size_t i = 0; i < offsets.size(); ++i) {
    const int64_t length = std::max<int64_t>(arguments.lengths[i], 0);
    check(
        offsets[i] >= 0 && offsets[i] <= INT32_MAX - length, arguments.function,
        ": topk_indices_offset must be >= 0 and topk_indices_offset + lengths fit into int32, got ",
        offsets[i], " at index ", i
    );
  }
  select_rows(arguments, out, [offsets](int64_t i, int32_t* indices, int64_t n) {
    const auto offset = static_cast<int32_t>(offsets[i]);
    for (int64_t j = 0; j < n; ++j) indices[j] += offset;
  });
}

void topk_transform(
    const TopkArguments& arguments,
    std::optional<TopkTransformMethod> method,
    const std::optional<TopkSlots>& slots,
    const std::optional<std::span<const int64_t>>& offsets,
    const TensorView& out
) {
  if (!method) {
    fast_topk(arguments, out);
  } else if (*method == TopkTransformMethod::paged) {
    check(slots.has_value(), arguments.function, ": page_table must be given for PAGED");
    fast_topk_transform_fused(arguments, *slots, out);
  } else if (offsets) {
    fast_topk_transform_ragged_fused(arguments, *offsets, out);
  } else {
    throw std::runtime_error(
        "RAGGED topk_transform requires topk_indices_offset; expected "
        "extend-without-speculative metadata."
    );
  }
}

}  // namespace cpattn
