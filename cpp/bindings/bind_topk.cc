// SPDX-License-Identifier: Apache-2.0
#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <vector>

#include "bindings/forward_mode_argument.h"
#include "bindings/index_argument.h"
#include "bindings/module.h"
#include "bindings/tensor_argument.h"
#include "cpattn/check.h"
#include "cpattn/topk.h"

namespace py = pybind11;

namespace cpattn::bindings {
namespace {

using OptionalInts = std::optional<std::vector<int64_t>>;

std::vector<int64_t> ints(const char* function, const char* argument, py::handle values) {
  return index_list(values, concat(function, ": ", argument).c_str());
}

OptionalInts optional_ints(const char* function, const char* argument, py::handle values) {
  return optional_index_list(values, concat(function, ": ", argument).c_str());
}

/// Owns what a TopkArguments borrows, and the result.
class TopkCall {
 public:
  TopkCall(
      const char* function,
      py::handle score,
      py::handle lengths,
      py::handle topk,
      py::handle row_starts,
      bool sorted,
      py::handle out
  )
      : score_(score, concat(function, ": score").c_str()),
        lengths_(ints(function, "lengths", lengths)),
        row_starts_(optional_ints(function, "row_starts", row_starts)),
        out_(output_argument(out, "out")) {
    arguments.function = function;
    arguments.score = *score_;
    arguments.lengths = lengths_;
    arguments.row_starts = row_starts_;
    arguments.topk = index_value(topk, concat(function, ": topk").c_str());
    arguments.sorted = sorted;
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
      const char* function, const char* argument, py::handle table, py::handle page_size
  )
      : table_(table, concat(function, ": ", argument).c_str()),
        page_size_(index_value(page_size, concat(function, ": page_size").c_str())) {}
  SlotTable operator*() const { return {*table_, page_size_}; }

 private:
  IndexTableArgument table_;
  int64_t page_size_;
};

void plain(
    const py::object& score,
    const py::object& lengths,
    const py::object& topk,
    const py::object& row_starts,
    bool sorted,
    const py::object& out
) {
  const TopkCall call("fast_topk", score, lengths, topk, row_starts, sorted, out);
  const Computation computation;
  fast_topk(call.arguments, call.out());
}

void paged(
    const py::object& score,
    const py::object& lengths,
    const py::object& page_table,
    const py::object& cu_seqlens_q,
    const py::object& page_size,
    const py::object& topk,
    const py::object& row_starts,
    bool sorted,
    const py::object& out
) {
  constexpr char kFunction[] = "fast_topk_transform_fused";
  const TopkCall call(kFunction, score, lengths, topk, row_starts, sorted, out);
  const SlotTableArgument table(kFunction, "page_table_size_1", page_table, page_size);
  const OptionalInts indptr = optional_ints(kFunction, "cu_seqlens_q", cu_seqlens_q);
  const Computation computation;
  fast_topk_transform_fused(
      call.arguments, {.table = *table, .cu_seqlens_q = indptr, .batch_idx_list = {}}, call.out()
  );
}

void ragged(
    const py::object& score,
    const py::object& lengths,
    const py::object& offsets,
    const py::object& topk,
    const py::object& row_starts,
    bool sorted,
    const py::object& out
) {
  constexpr char kFunction[] = "fast_topk_transform_ragged_fused";
  const TopkCall call(kFunction, score, lengths, topk, row_starts, sorted, out);
  const std::vector<int64_t> list = ints(kFunction, "topk_indices_offset", offsets);
  const Computation computation;
  fast_topk_transform_ragged_fused(call.arguments, list, call.out());
}

std::optional<TopkTransformMethod> parse_method(py::handle method) {
  if (method.is_none()) return std::nullopt;
  const int64_t value = index_value(method, "topk_transform: method");
  check(
      value == 1 || value == 2,
      "topk_transform: method must be TopkTransformMethod.PAGED, RAGGED or None, got ", value
  );
  return static_cast<TopkTransformMethod>(value);
}

void transform(
    const py::object& logits,
    const py::object& topk,
    const py::object& method,
    const py::object& lengths,
    const py::object& page_table,
    const py::object& cu_seqlens_q,
    const py::object& topk_indices_offset,
    const py::object& row_starts,
    const py::object& batch_idx_list,
    const py::object& page_size,
    bool sorted,
    const py::object& out
) {
  constexpr char kFunction[] = "topk_transform";
  const auto kind = parse_method(method);
  const TopkCall call(kFunction, logits, lengths, topk, row_starts, sorted, out);
  const OptionalInts offsets = optional_ints(kFunction, "topk_indices_offset", topk_indices_offset);
  const OptionalInts indptr = optional_ints(kFunction, "cu_seqlens_q", cu_seqlens_q);
  const OptionalInts rows = optional_ints(kFunction, "batch_idx_list", batch_idx_list);
  std::optional<SlotTableArgument> table;
  std::optional<TopkSlots> slots;
  if (!page_table.is_none()) {
    table.emplace(kFunction, "page_table", page_table, page_size);
    slots = {.table = **table, .cu_seqlens_q = indptr, .batch_idx_list = rows};
  }
  const Computation computation;
  topk_transform(call.arguments, kind, slots, offsets, call.out());
}

void transform_decode(
    const py::object& page_table,
    const py::object& topk_indices,
    const py::object& page_size,
    const py::object& out
) {
  constexpr char kFunction[] = "transform_index_page_table_decode";
  const SlotTableArgument table(kFunction, "page_table", page_table, page_size);
  const IndexTableArgument indices(topk_indices, "transform_index_page_table_decode: topk_indices");
  const TensorArgument out_view = output_argument(out, "out");
  const Computation computation;
  transform_index_page_table_decode(*table, *indices, *out_view);
}

void transform_prefill(
    const py::object& page_table,
    const py::object& topk_indices,
    const py::object& extend_lens,
    const py::object& page_size,
    const py::object& out
) {
  constexpr char kFunction[] = "transform_index_page_table_prefill";
  const SlotTableArgument table(kFunction, "page_table", page_table, page_size);
  const IndexTableArgument indices(
      topk_indices, "transform_index_page_table_prefill: topk_indices"
  );
  const std::vector<int64_t> lens = ints(kFunction, "extend_lens_cpu", extend_lens);
  const TensorArgument out_view = output_argument(out, "out");
  const Computation computation;
  transform_index_page_table_prefill(*table, *indices, lens, *out_view);
}

void whole_sequences(
    const py::object& page_table,
    const py::object& lengths,
    const py::object& page_size,
    const py::object& out
) {
  constexpr char kFunction[] = "page_table_to_topk";
  const SlotTableArgument table(kFunction, "page_table", page_table, page_size);
  const std::vector<int64_t> lens = ints(kFunction, "lengths", lengths);
  const TensorArgument out_view = output_argument(out, "out");
  const Computation computation;
  page_table_to_topk(*table, lens, *out_view);
}

int choose_method(const py::object& forward_mode, bool fp8_kv_cache, const std::string& impl) {
  const auto mode = optional_mode(forward_mode, "get_topk_transform_method: forward_mode");
  return static_cast<int>(get_topk_transform_method(mode, fp8_kv_cache, impl));
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
