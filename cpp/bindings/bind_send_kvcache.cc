// SPDX-License-Identifier: Apache-2.0
#include <vector>

#include "bindings/index_argument.h"
#include "bindings/module.h"
#include "bindings/uint64_argument.h"
#include "cpattn/check.h"
#include "cpattn/send_kvcache.h"

namespace py = pybind11;

namespace cpattn::bindings {
namespace {

std::vector<uint64_t> lengths(const char* function, const char* argument, py::handle object) {
  if (object.is_none()) return {};
  return uint64_list(object, concat(function, ": ", argument).c_str());
}

/// Owns what SendBuffers borrow. Given as (src addresses, src data lengths or None, src item
/// lengths, dst addresses, dst item lengths or None).
class Buffers {
 public:
  Buffers(const char* function, const py::tuple& lists)
      : src_addrs_(lengths(function, "source addresses", lists[0])),
        src_data_lens_(lengths(function, "source data lengths", lists[1])),
        src_item_lens_(lengths(function, "source item lengths", lists[2])),
        dst_addrs_(lengths(function, "destination addresses", lists[3])),
        dst_item_lens_(lengths(function, "destination item lengths", lists[4])) {}

  SendBuffers operator*() const {
    return {src_addrs_, src_data_lens_, src_item_lens_, dst_addrs_, dst_item_lens_};
  }

 private:
  std::vector<uint64_t> src_addrs_, src_data_lens_, src_item_lens_, dst_addrs_, dst_item_lens_;
};

/// Owns what SendItems borrow.
class Items {
 public:
  Items(const char* function, py::handle src, py::handle dst)
      : src_(index_list(src, concat(function, ": source indices").c_str())),
        dst_(index_list(dst, concat(function, ": destination indices").c_str())) {}

  SendItems operator*() const { return {src_, dst_}; }

 private:
  std::vector<int64_t> src_, dst_;
};

/// Given as (prefill_start_layer, kv_buf_groups, total_kv_layers, hidden_kv_layers or None,
/// draft_kv_layers, is_last_rank, pp_size, is_mla, prefill_end_layer or None).
SendStage stage_of(const char* function, const py::tuple& fields) {
  const auto value = [&](int i, const char* name) {
    return index_value(fields[i], concat(function, ": ", name).c_str());
  };
  SendStage stage{
      .kv =
          {.prefill_start_layer = value(0, "prefill_start_layer"),
           .kv_buf_groups = value(1, "kv_buf_groups"),
           .total_kv_layers = value(2, "total_kv_layers"),
           .hidden_kv_layers = {},
           .draft_kv_layers = value(4, "draft_kv_layers"),
           .is_last_rank = fields[5].cast<bool>()},
      .prefill_end_layer = {},
      .pp_size = value(6, "pp_size"),
      .is_mla = fields[7].cast<bool>()
  };
  if (!fields[3].is_none()) stage.kv.hidden_kv_layers = value(3, "hidden_kv_layers");
  if (!fields[8].is_none()) stage.prefill_end_layer = value(8, "prefill_end_layer");
  return stage;
}

TransferPlan send_kvcache(
    const py::tuple& lists,
    const py::object& src_pages,
    const py::object& dst_pages,
    const py::tuple& stage,
    bool compat
) {
  constexpr char kFunction[] = "plan_send_kvcache";
  const Buffers buffers(kFunction, lists);
  const Items pages(kFunction, src_pages, dst_pages);
  const SendStage sender = stage_of(kFunction, stage);
  const py::gil_scoped_release release;
  return plan_send_kvcache(*buffers, *pages, sender, compat);
}

/// (src_start, dst_start, num_heads, src_heads, dst_heads)
py::tuple heads(
    const py::object& total_kv_heads,
    const py::object& src_tp_size,
    const py::object& src_rank,
    const py::object& dst_tp_size,
    const py::object& dst_rank,
    bool compat
) {
  const HeadSlice slice = slice_heads(
      index_value(total_kv_heads, "slice_heads: total_kv_heads"),
      index_value(src_tp_size, "slice_heads: prefill_tp_size"),
      index_value(src_rank, "slice_heads: prefill_rank"),
      index_value(dst_tp_size, "slice_heads: decode_tp_size"),
      index_value(dst_rank, "slice_heads: decode_rank"), compat
  );
  return py::make_tuple(
      slice.src_start, slice.dst_start, slice.num_heads, slice.src_heads, slice.dst_heads
  );
}

HeadSlice slice_of(const py::tuple& fields) {
  const auto field = [&](int i) { return fields[i].cast<int64_t>(); };
  return {field(0), field(1), field(2), field(3), field(4)};
}

TransferPlan send_kvcache_slice(
    const py::tuple& lists,
    const py::object& src_pages,
    const py::object& dst_pages,
    const py::object& page_size,
    const py::tuple& head_slice,
    const py::tuple& stage,
    bool compat
) {
  constexpr char kFunction[] = "plan_send_kvcache_slice";
  const Buffers buffers(kFunction, lists);
  const Items pages(kFunction, src_pages, dst_pages);
  const SendStage sender = stage_of(kFunction, stage);
  const HeadSlice slice = slice_of(head_slice);
  const int64_t tokens = index_value(page_size, "plan_send_kvcache_slice: page_size");
  const py::gil_scoped_release release;
  return plan_send_kvcache_slice(*buffers, *pages, tokens, slice, sender, compat);
}

TransferPlan send_aux(
    const py::tuple& lists, const py::object& src_index, const py::object& dst_index, bool compat
) {
  constexpr char kFunction[] = "plan_send_aux";
  const Buffers buffers(kFunction, lists);
  const std::vector<int64_t> src = {index_value(src_index, "plan_send_aux: src_aux_index")};
  const std::vector<int64_t> dst = {index_value(dst_index, "plan_send_aux: dst_aux_index")};
  return plan_send_items(kFunction, "aux", *buffers, {src, dst}, compat);
}

TransferPlan send_state(const py::list& components, bool compat) {
  constexpr char kFunction[] = "plan_send_state";
  std::vector<TransferPlan> plans;
  for (const py::handle component : components) {
    const auto fields = component.cast<py::tuple>();
    const Buffers buffers(kFunction, fields[0].cast<py::tuple>());
    const Items items(kFunction, fields[1], fields[2]);
    plans.push_back(plan_send_items(kFunction, "state", *buffers, *items, compat));
  }
  return concatenate(plans);
}

}  // namespace

void register_send_kvcache(py::module_& module) {
  module.def("plan_send_kvcache", &send_kvcache);
  module.def("slice_heads", &heads);
  module.def("plan_send_kvcache_slice", &send_kvcache_slice);
  module.def("plan_send_aux", &send_aux);
  module.def("plan_send_state", &send_state);
}

}  // namespace cpattn::bindings
