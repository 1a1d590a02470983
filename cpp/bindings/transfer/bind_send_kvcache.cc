// SPDX-License-Identifier: Apache-2.0
#include <vector>

#include "bindings/arguments/arguments.h"
#include "bindings/arguments/uint64_argument.h"
#include "bindings/module.h"
#include "cpattn/base/check.h"
#include "cpattn/transfer/send_kvcache.h"
#include "cpattn/transfer/send_state.h"

namespace py = pybind11;

namespace cpattn::bindings {
namespace {

std::vector<uint64_t> lengths(const char* function, const char* argument, py::handle object) {
  if (object.is_none()) return {};
  return uint64_list(object, {function, argument});
}

std::vector<int64_t> layer_ids(const char* function, const char* argument, py::handle object) {
  if (object.is_none()) return {};
  return index_list(object, {function, argument});
}

/// Owns the memory that SendBuffers borrow. The tuple has src addresses, src data lengths or None,
/// src item lengths, dst addresses, dst item lengths or None, and layer ids of src and dst or None.
class Buffers {
 public:
  Buffers(const char* function, const py::tuple& lists)
      : src_addrs_(lengths(function, "source addresses", lists[0])),
        src_data_lens_(lengths(function, "source data lengths", lists[1])),
        src_item_lens_(lengths(function, "source item lengths", lists[2])),
        dst_addrs_(lengths(function, "destination addresses", lists[3])),
        dst_item_lens_(lengths(function, "destination item lengths", lists[4])),
        src_layer_ids_(layer_ids(function, "source layer ids", lists[5])),
        dst_layer_ids_(layer_ids(function, "destination layer ids", lists[6])) {}

  SendBuffers operator*() const {
    return {src_addrs_,     src_data_lens_, src_item_lens_, dst_addrs_,
            dst_item_lens_, src_layer_ids_, dst_layer_ids_};
  }

 private:
  std::vector<uint64_t> src_addrs_, src_data_lens_, src_item_lens_, dst_addrs_, dst_item_lens_;
  std::vector<int64_t> src_layer_ids_, dst_layer_ids_;
};

/// Owns the memory that SendItems borrow.
class Items {
 public:
  Items(const Arguments& read, py::handle src, py::handle dst)
      : src_(read.ints(src, "source indices")), dst_(read.ints(dst, "destination indices")) {}

  SendItems operator*() const { return {src_, dst_}; }

 private:
  std::vector<int64_t> src_, dst_;
};

/// Given as (prefill_start_layer, kv_buf_groups, total_kv_layers, hidden_kv_layers or None,
/// draft_kv_layers, is_last_rank, pp_size, is_mla, prefill_end_layer or None).
SendStage stage_of(const Arguments& read, const py::tuple& fields) {
  return {
      .kv =
          {.prefill_start_layer = read.integer(fields[0], "prefill_start_layer"),
           .kv_buf_groups = read.integer(fields[1], "kv_buf_groups"),
           .total_kv_layers = read.integer(fields[2], "total_kv_layers"),
           .hidden_kv_layers = read.optional_integer(fields[3], "hidden_kv_layers"),
           .draft_kv_layers = read.integer(fields[4], "draft_kv_layers"),
           .is_last_rank = read.flag(fields[5], "is_last_rank")},
      .prefill_end_layer = read.optional_integer(fields[8], "prefill_end_layer"),
      .pp_size = read.integer(fields[6], "pp_size"),
      .is_mla = read.flag(fields[7], "is_mla"),
  };
}

TransferPlan send_kvcache(
    const py::tuple& lists,
    py::handle src_pages,
    py::handle dst_pages,
    const py::tuple& stage,
    py::handle compat
) {
  const Arguments read("plan_send_kvcache");
  const Buffers buffers(read.function(), lists);
  const Items pages(read, src_pages, dst_pages);
  const SendStage sender = stage_of(read, stage);
  const bool is_compat = read.flag(compat, "compat");
  const GilRelease release;
  return plan_send_kvcache(*buffers, *pages, sender, is_compat);
}

/// (src_start, dst_start, num_heads, src_heads, dst_heads)
py::tuple heads(
    py::handle total_kv_heads,
    py::handle prefill_tp_size,
    py::handle prefill_rank,
    py::handle decode_tp_size,
    py::handle decode_rank,
    py::handle compat
) {
  const Arguments read("slice_heads");
  const int64_t num_heads = read.integer(total_kv_heads, "total_kv_heads");
  const int64_t src_size = read.integer(prefill_tp_size, "prefill_tp_size");
  const int64_t src_rank = read.integer(prefill_rank, "prefill_rank");
  const int64_t dst_size = read.integer(decode_tp_size, "decode_tp_size");
  const int64_t dst_rank = read.integer(decode_rank, "decode_rank");
  const HeadSlice slice =
      slice_heads(num_heads, src_size, src_rank, dst_size, dst_rank, read.flag(compat, "compat"));
  return py::make_tuple(
      slice.src_start, slice.dst_start, slice.num_heads, slice.src_heads, slice.dst_heads
  );
}

HeadSlice slice_of(const Arguments& read, py::handle head_slice) {
  const std::vector<int64_t> fields = read.ints(head_slice, "heads");
  check(fields.size() == 5, read.name("heads"), " must have 5 fields, got ", fields.size());
  return {fields[0], fields[1], fields[2], fields[3], fields[4]};
}

TransferPlan send_kvcache_slice(
    const py::tuple& lists,
    py::handle src_pages,
    py::handle dst_pages,
    py::handle page_size,
    py::handle head_slice,
    const py::tuple& stage,
    py::handle compat
) {
  const Arguments read("plan_send_kvcache_slice");
  const Buffers buffers(read.function(), lists);
  const Items pages(read, src_pages, dst_pages);
  const SendStage sender = stage_of(read, stage);
  const HeadSlice slice = slice_of(read, head_slice);
  const int64_t tokens = read.integer(page_size, "page_size");
  const bool is_compat = read.flag(compat, "compat");
  const GilRelease release;
  return plan_send_kvcache_slice(*buffers, *pages, tokens, slice, sender, is_compat);
}

TransferPlan send_aux(
    const py::tuple& lists, py::handle src_index, py::handle dst_index, py::handle compat
) {
  const Arguments read("plan_send_aux");
  const Buffers buffers(read.function(), lists);
  const std::vector<int64_t> src = {read.integer(src_index, "src_aux_index")};
  const std::vector<int64_t> dst = {read.integer(dst_index, "dst_aux_index")};
  return plan_send_aux(*buffers, {src, dst}, read.flag(compat, "compat"));
}

/// A component is (lists, source indices, destination indices, prefill_start_layer or None,
/// prefill_end_layer or None, pp_size, is_flat, allow_dst_elision).
TransferPlan send_component(const Arguments& read, const py::tuple& fields, bool compat) {
  const auto lists = fields[0].cast<py::tuple>();
  const Buffers buffers(read.function(), lists);
  const Items items(read, fields[1], fields[2]);
  const StateEntries entries{
      .prefill_start_layer = read.optional_integer(fields[3], "prefill_start_layer"),
      .prefill_end_layer = read.optional_integer(fields[4], "prefill_end_layer"),
      .pp_size = read.integer(fields[5], "pp_size"),
      .is_flat = read.flag(fields[6], "is_flat"),
      .has_dst_item_lens = !lists[4].is_none(),
      .allow_dst_elision = read.flag(fields[7], "allow_dst_elision"),
  };
  return plan_send_state(*buffers, *items, entries, compat);
}

TransferPlan send_state(const py::list& components, py::handle compat) {
  const Arguments read("plan_send_state");
  const bool is_compat = read.flag(compat, "compat");
  std::vector<TransferPlan> plans;
  for (const py::handle component : components) {
    plans.push_back(send_component(read, component.cast<py::tuple>(), is_compat));
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
