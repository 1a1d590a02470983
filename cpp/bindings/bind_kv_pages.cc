// SPDX-License-Identifier: Apache-2.0
#include <pybind11/stl.h>

#include <vector>

#include "bindings/index_argument.h"
#include "bindings/int_arrays.h"
#include "bindings/module.h"
#include "cpattn/check.h"
#include "cpattn/kv_pages.h"
#include "cpattn/kv_pointers.h"

namespace py = pybind11;

namespace cpattn::bindings {
namespace {

int64_t page_num(const py::object& num_tokens, const py::object& page_size) {
  return kv_to_page_num(
      index_value(num_tokens, "kv_to_page_num: num_tokens"),
      index_value(page_size, "kv_to_page_num: page_size")
  );
}

py::array page_indices(const py::object& kv_indices, const py::object& page_size) {
  const std::vector<int64_t> slots = index_list(kv_indices, "kv_to_page_indices: kv_indices");
  return int_array(
      kv_to_page_indices(slots, index_value(page_size, "kv_to_page_indices: page_size"))
  );
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

py::tuple group(const py::object& src_indices, const py::object& dst_indices) {
  const auto src = index_list(src_indices, "group_concurrent_contiguous: src_indices");
  const auto dst = index_list(dst_indices, "group_concurrent_contiguous: dst_indices");
  const std::vector<TransferRun> runs = group_runs(src, dst);
  py::list src_groups(runs.size());
  py::list dst_groups(runs.size());
  for (std::size_t i = 0; i < runs.size(); ++i) {
    PyList_SET_ITEM(src_groups.ptr(), i, ascending(runs[i].src, runs[i].count).release().ptr());
    PyList_SET_ITEM(dst_groups.ptr(), i, ascending(runs[i].dst, runs[i].count).release().ptr());
  }
  return py::make_tuple(std::move(src_groups), std::move(dst_groups));
}

py::tuple pair(const KVRange& range) { return py::make_tuple(range.begin, range.end); }

py::tuple mha_entries(
    int64_t num_src,
    int64_t num_dst,
    const py::object& prefill_start_layer,
    const py::object& total_kv_layers,
    bool compat
) {
  const MhaEntries entries = mha_kv_entries(
      num_src, num_dst,
      index_value(prefill_start_layer, "get_mha_kv_ptrs_with_pp: prefill_start_layer"),
      index_value(total_kv_layers, "get_mha_kv_ptrs_with_pp: total_kv_layers"), compat
  );
  return py::make_tuple(
      pair(entries.src_k), pair(entries.src_v), pair(entries.dst_k), pair(entries.dst_v),
      entries.num_layers
  );
}

py::list mla_entries(
    int64_t num_src,
    int64_t num_dst,
    const py::object& prefill_start_layer,
    const py::object& kv_buf_groups,
    const py::object& total_kv_layers,
    const py::object& hidden_kv_layers,
    const py::object& draft_kv_layers,
    bool is_last_rank,
    bool compat
) {
  const auto value = [](const py::object& object, const char* argument) {
    return index_value(object, concat("get_mla_kv_ptrs_with_pp: ", argument).c_str());
  };
  KVStage stage{
      .prefill_start_layer = value(prefill_start_layer, "prefill_start_layer"),
      .kv_buf_groups = value(kv_buf_groups, "kv_buf_groups"),
      .total_kv_layers = value(total_kv_layers, "total_kv_layers"),
      .draft_kv_layers = value(draft_kv_layers, "draft_kv_layers"),
      .is_last_rank = is_last_rank
  };
  if (!hidden_kv_layers.is_none()) {
    stage.hidden_kv_layers = value(hidden_kv_layers, "hidden_kv_layers");
  }
  py::list ranges;
  for (const KVRange& range : mla_kv_entries(num_src, num_dst, stage, compat)) {
    ranges.append(pair(range));
  }
  return ranges;
}

std::vector<std::pair<int64_t, int64_t>> entry_pairs(
    const py::object& src_layer_ids,
    const py::object& dst_layer_ids,
    const py::object& num_src,
    const py::object& num_dst,
    bool allow_positional_fallback
) {
  constexpr char kSrcIds[] = "build_transfer_entry_pairs: src_layer_ids";
  constexpr char kDstIds[] = "build_transfer_entry_pairs: dst_layer_ids";
  return build_transfer_entry_pairs(
      optional_index_list(src_layer_ids, kSrcIds).value_or(std::vector<int64_t>{}),
      optional_index_list(dst_layer_ids, kDstIds).value_or(std::vector<int64_t>{}),
      index_value(num_src, "build_transfer_entry_pairs: n_src"),
      index_value(num_dst, "build_transfer_entry_pairs: n_dst"), allow_positional_fallback
  );
}

int64_t start_layer(const py::object& start, const py::object& kv_layer_ids) {
  return kv_start_layer(
      index_value(start, "kv_start_layer: start_layer"),
      index_list(kv_layer_ids, "kv_start_layer: kv_layer_ids")
  );
}

py::tuple targets(
    const py::object& engine_rank,
    const py::object& prefill_tp_size,
    const py::object& decode_tp_size,
    bool is_mla
) {
  const DecodeTargets targets = decode_targets(
      index_value(engine_rank, "decode_targets: engine_rank"),
      index_value(prefill_tp_size, "decode_targets: prefill_tp_size"),
      index_value(decode_tp_size, "decode_targets: decode_tp_size"), is_mla
  );
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
