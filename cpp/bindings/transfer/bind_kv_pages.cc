// SPDX-License-Identifier: Apache-2.0
#include <pybind11/stl.h>

#include <vector>

#include "bindings/arguments/arguments.h"
#include "bindings/arguments/int_arrays.h"
#include "bindings/module.h"
#include "cpattn/transfer/kv_pages.h"
#include "cpattn/transfer/kv_pointers.h"

namespace py = pybind11;

namespace cpattn::bindings {
namespace {

int64_t page_num(py::handle num_tokens, py::handle page_size) {
  const Arguments read("kv_to_page_num");
  const int64_t tokens = read.integer(num_tokens, "num_tokens");
  return kv_to_page_num(tokens, read.integer(page_size, "page_size"));
}

py::array page_indices(py::handle kv_indices, py::handle page_size) {
  const Arguments read("kv_to_page_indices");
  const std::vector<int64_t> slots = read.ints(kv_indices, "kv_indices");
  return int_array(kv_to_page_indices(slots, read.integer(page_size, "page_size")));
}

/// [first, first + 1, ..., first + count - 1]
py::list ascending(int64_t first, int64_t count) {
  auto list = py::reinterpret_steal<py::list>(PyList_New(count));
  if (!list) throw py::error_already_set();
  for (int64_t i = 0; i < count; ++i) {
    const uint64_t value = static_cast<uint64_t>(first) + static_cast<uint64_t>(i);  // may wrap
    PyObject* item = PyLong_FromLongLong(static_cast<int64_t>(value));
    if (item == nullptr) throw py::error_already_set();
    PyList_SET_ITEM(list.ptr(), i, item);
  }
  return list;
}

py::tuple group(py::handle src_indices, py::handle dst_indices) {
  const Arguments read("group_concurrent_contiguous");
  const std::vector<int64_t> src = read.ints(src_indices, "src_indices");
  const std::vector<int64_t> dst = read.ints(dst_indices, "dst_indices");
  const std::vector<TransferRun> runs = group_runs(src, dst);
  py::list src_groups(runs.size());
  py::list dst_groups(runs.size());
  for (std::size_t i = 0; i < runs.size(); ++i) {
    PyList_SET_ITEM(src_groups.ptr(), i, ascending(runs[i].src, runs[i].count).release().ptr());
    PyList_SET_ITEM(dst_groups.ptr(), i, ascending(runs[i].dst, runs[i].count).release().ptr());
  }
  return py::make_tuple(std::move(src_groups), std::move(dst_groups));
}

py::tuple pair(const IndexRange& range) { return py::make_tuple(range.begin, range.end); }

py::tuple mha_entries(
    int64_t num_src,
    int64_t num_dst,
    py::handle prefill_start_layer,
    py::handle total_kv_layers,
    py::handle compat
) {
  const Arguments read("get_mha_kv_ptrs_with_pp");
  const int64_t start_layer = read.integer(prefill_start_layer, "prefill_start_layer");
  const int64_t total_layers = read.integer(total_kv_layers, "total_kv_layers");
  const MhaEntries entries =
      mha_kv_entries(num_src, num_dst, start_layer, total_layers, read.flag(compat, "compat"));
  return py::make_tuple(
      pair(entries.src_k), pair(entries.src_v), pair(entries.dst_k), pair(entries.dst_v),
      entries.num_layers
  );
}

py::list mla_entries(
    int64_t num_src,
    int64_t num_dst,
    py::handle prefill_start_layer,
    py::handle kv_buf_groups,
    py::handle total_kv_layers,
    py::handle hidden_kv_layers,
    py::handle draft_kv_layers,
    py::handle is_last_rank,
    py::handle num_draft_entries,
    py::handle compat
) {
  const Arguments read("get_mla_kv_ptrs_with_pp");
  const KVStage stage{
      .prefill_start_layer = read.integer(prefill_start_layer, "prefill_start_layer"),
      .kv_buf_groups = read.integer(kv_buf_groups, "kv_buf_groups"),
      .total_kv_layers = read.integer(total_kv_layers, "total_kv_layers"),
      .hidden_kv_layers = read.optional_integer(hidden_kv_layers, "hidden_kv_layers"),
      .draft_kv_layers = read.integer(draft_kv_layers, "draft_kv_layers"),
      .is_last_rank = read.flag(is_last_rank, "is_last_rank"),
      .num_draft_entries = read.optional_integer(num_draft_entries, "num_draft_entries"),
  };
  const bool is_compat = read.flag(compat, "compat");
  py::list ranges;
  for (const IndexRange& range : mla_kv_entries(num_src, num_dst, stage, is_compat)) {
    ranges.append(pair(range));
  }
  return ranges;
}

std::vector<std::pair<int64_t, int64_t>> entry_pairs(
    py::handle src_layer_ids,
    py::handle dst_layer_ids,
    py::handle n_src,
    py::handle n_dst,
    py::handle allow_positional_fallback
) {
  const Arguments read("build_transfer_entry_pairs");
  const auto src_ids = read.optional_ints(src_layer_ids, "src_layer_ids");
  const auto dst_ids = read.optional_ints(dst_layer_ids, "dst_layer_ids");
  const int64_t num_src = read.integer(n_src, "n_src");
  const int64_t num_dst = read.integer(n_dst, "n_dst");
  return build_transfer_entry_pairs(
      src_ids.value_or(std::vector<int64_t>{}), dst_ids.value_or(std::vector<int64_t>{}), num_src,
      num_dst, read.flag(allow_positional_fallback, "allow_positional_fallback")
  );
}

int64_t start_layer(py::handle start, py::handle kv_layer_ids) {
  const Arguments read("kv_start_layer");
  const int64_t first = read.integer(start, "start_layer");
  return kv_start_layer(first, read.ints(kv_layer_ids, "kv_layer_ids"));
}

py::tuple targets(
    py::handle engine_rank, py::handle prefill_tp_size, py::handle decode_tp_size, py::handle is_mla
) {
  const Arguments read("decode_targets");
  const int64_t rank = read.integer(engine_rank, "engine_rank");
  const int64_t prefill_size = read.integer(prefill_tp_size, "prefill_tp_size");
  const int64_t decode_size = read.integer(decode_tp_size, "decode_tp_size");
  const DecodeTargets targets =
      decode_targets(rank, prefill_size, decode_size, read.flag(is_mla, "is_mla"));
  return py::make_tuple(
      targets.ranks.begin, targets.ranks.end, targets.num_real, targets.required_dst_info_num
  );
}

}  // namespace

void register_kv_pages(py::module_& module) {
  module.def("kv_to_page_num", &page_num);
  module.def("kv_to_page_indices", &page_indices);
  module.def("group_concurrent_contiguous", &group);
  module.def("mha_kv_entries", &mha_entries);
  module.def("mla_kv_entries", &mla_entries);
  module.def("build_transfer_entry_pairs", &entry_pairs);
  module.def("kv_start_layer", &start_layer);
  module.def("decode_targets", &targets);
}

}  // namespace cpattn::bindings
