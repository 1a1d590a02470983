// SPDX-License-Identifier: Apache-2.0
#include <optional>
#include <string>
#include <vector>

#include "bindings/arguments/arguments.h"
#include "bindings/context_parallel/forward_mode_argument.h"
#include "bindings/module.h"
#include "cpattn/sparse/topk.h"

namespace py = pybind11;

namespace cpattn::bindings {
namespace {

using OptionalInts = std::optional<std::vector<int64_t>>;

/// Owns the memory that a TopkArguments borrows, and the result.
class TopkCall {
 public:
  TopkCall(
      const Arguments& read,
      py::handle score,
      py::handle lengths,
      py::handle topk,
      py::handle row_starts,
      py::handle sorted,
      py::handle out,
      const char* score_name = "score"
  )
      : score_(read.tensor(score, score_name)),
        lengths_(read.ints(lengths, "lengths")),
        row_starts_(read.optional_ints(row_starts, "row_starts")),
        out_(read.output(out, "out")) {
    arguments.function = read.function();
    arguments.score_name = score_name;
    arguments.score = *score_;
    arguments.lengths = lengths_;
    arguments.row_starts = row_starts_;
    arguments.topk = read.integer(topk, "topk");
    arguments.sorted = read.flag(sorted, "sorted");
  }
  const TensorView& out() const { return *out_; }

  TopkArguments arguments{};

 private:
  TensorArgument score_;
  std::vector<int64_t> lengths_;
  OptionalInts row_starts_;
  TensorArgument out_;
};

class SlotTableArgument {
 public:
  SlotTableArgument(
      const Arguments& read, const char* argument, py::handle table, py::handle page_size
  )
      : table_(read.table(table, argument)), page_size_(read.integer(page_size, "page_size")) {}
  SlotTable operator*() const { return {*table_, page_size_}; }

 private:
  IndexTableArgument table_;
  int64_t page_size_;
};

void plain(
    py::handle score,
    py::handle lengths,
    py::handle topk,
    py::handle row_starts,
    py::handle sorted,
    py::handle out
) {
  const Arguments read("fast_topk");
  const TopkCall call(read, score, lengths, topk, row_starts, sorted, out);
  const Computation computation;
  fast_topk(call.arguments, call.out());
}

void paged(
    py::handle score,
    py::handle lengths,
    py::handle page_table,
    py::handle cu_seqlens_q,
    py::handle page_size,
    py::handle topk,
    py::handle row_starts,
    py::handle sorted,
    py::handle out
) {
  const Arguments read("fast_topk_transform_fused");
  const TopkCall call(read, score, lengths, topk, row_starts, sorted, out);
  const SlotTableArgument table(read, "page_table_size_1", page_table, page_size);
  const OptionalInts indptr = read.optional_ints(cu_seqlens_q, "cu_seqlens_q");
  const Computation computation;
  fast_topk_transform_fused(
      call.arguments, {.table = *table, .cu_seqlens_q = indptr, .batch_idx_list = {}}, call.out()
  );
}

void ragged(
    py::handle score,
    py::handle lengths,
    py::handle offsets,
    py::handle topk,
    py::handle row_starts,
    py::handle sorted,
    py::handle out
) {
  const Arguments read("fast_topk_transform_ragged_fused");
  const TopkCall call(read, score, lengths, topk, row_starts, sorted, out);
  const std::vector<int64_t> list = read.ints(offsets, "topk_indices_offset");
  const Computation computation;
  fast_topk_transform_ragged_fused(call.arguments, list, call.out());
}

void transform(
    py::handle logits,
    py::handle topk,
    py::handle method,
    py::handle lengths,
    py::handle page_table,
    py::handle cu_seqlens_q,
    py::handle topk_indices_offset,
    py::handle row_starts,
    py::handle batch_idx_list,
    py::handle page_size,
    py::handle sorted,
    py::handle out
) {
  const Arguments read("topk_transform");
  const auto kind =
      parse_topk_transform_method(read.function(), read.optional_integer(method, "method"));
  const TopkCall call(read, logits, lengths, topk, row_starts, sorted, out, "logits");
  const OptionalInts offsets = read.optional_ints(topk_indices_offset, "topk_indices_offset");
  const OptionalInts indptr = read.optional_ints(cu_seqlens_q, "cu_seqlens_q");
  const OptionalInts rows = read.optional_ints(batch_idx_list, "batch_idx_list");
  std::optional<SlotTableArgument> table;
  std::optional<TopkSlots> slots;
  if (!page_table.is_none()) {
    table.emplace(read, "page_table", page_table, page_size);
    slots = {.table = **table, .cu_seqlens_q = indptr, .batch_idx_list = rows};
  }
  const Computation computation;
  topk_transform(call.arguments, kind, slots, offsets, call.out());
}

void transform_decode(
    py::handle page_table, py::handle topk_indices, py::handle page_size, py::handle out
) {
  const Arguments read("transform_index_page_table_decode");
  const SlotTableArgument table(read, "page_table", page_table, page_size);
  const IndexTableArgument indices = read.table(topk_indices, "topk_indices");
  const TensorArgument out_view = read.output(out, "out");
  const Computation computation;
  transform_index_page_table_decode(*table, *indices, *out_view);
}

void transform_prefill(
    py::handle page_table,
    py::handle topk_indices,
    py::handle extend_lens,
    py::handle page_size,
    py::handle out
) {
  const Arguments read("transform_index_page_table_prefill");
  const SlotTableArgument table(read, "page_table", page_table, page_size);
  const IndexTableArgument indices = read.table(topk_indices, "topk_indices");
  const std::vector<int64_t> lens = read.ints(extend_lens, "extend_lens_cpu");
  const TensorArgument out_view = read.output(out, "out");
  const Computation computation;
  transform_index_page_table_prefill(*table, *indices, lens, *out_view);
}

void whole_sequences(
    py::handle page_table, py::handle lengths, py::handle page_size, py::handle out
) {
  const Arguments read("page_table_to_topk");
  const SlotTableArgument table(read, "page_table", page_table, page_size);
  const std::vector<int64_t> lens = read.ints(lengths, "lengths");
  const TensorArgument out_view = read.output(out, "out");
  const Computation computation;
  page_table_to_topk(*table, lens, *out_view);
}

int choose_method(py::handle forward_mode, py::handle fp8_kv_cache, py::handle prefill_impl) {
  const Arguments read("get_topk_transform_method");
  const auto mode = optional_mode(forward_mode, read.name("forward_mode"));
  const bool is_fp8 = read.flag(fp8_kv_cache, "fp8_kv_cache");
  const std::string impl = read.text(prefill_impl, "prefill_impl");
  return static_cast<int>(get_topk_transform_method(mode, is_fp8, impl));
}

}  // namespace

void register_topk(py::module_& module) {
  module.def("fast_topk", &plain);
  module.def("fast_topk_transform_fused", &paged);
  module.def("fast_topk_transform_ragged_fused", &ragged);
  module.def("topk_transform", &transform);
  module.def("transform_index_page_table_decode", &transform_decode);
  module.def("transform_index_page_table_prefill", &transform_prefill);
  module.def("page_table_to_topk", &whole_sequences);
  module.def("get_topk_transform_method", &choose_method);
}

}  // namespace cpattn::bindings
