// SPDX-License-Identifier: Apache-2.0
#include <pybind11/operators.h>
#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings/index_argument.h"
#include "bindings/module.h"
#include "bindings/uint64_argument.h"
#include "cpattn/check.h"
#include "cpattn/kv_transfer.h"

namespace py = pybind11;

namespace cpattn::bindings {
namespace {

constexpr KVKind kKinds[] = {KVKind::k, KVKind::v, KVKind::index_k, KVKind::state};

KVKind kind_of(const std::string& name) {
  for (const KVKind kind : kKinds) {
    if (name == kv_kind_name(kind)) return kind;
  }
  throw std::invalid_argument(
      concat("KVLayout: kind must be k, v, index_k or state, got \"", name, "\"")
  );
}

KVEntry entry_of(const py::tuple& fields) {
  return {
      .layer_id = index_value(fields[0], "KVLayout: layer_id"),
      .kind = kind_of(fields[1].cast<std::string>()),
      .is_draft = fields[2].cast<bool>(),
      .addr = uint64_value(fields[3], "KVLayout: addr"),
      .num_bytes = uint64_value(fields[4], "KVLayout: nbytes"),
      .item_len = uint64_value(fields[5], "KVLayout: item_len"),
      .token_rows = fields[6].cast<bool>(),
  };
}

py::tuple tuple_of(const KVEntry& entry) {
  return py::make_tuple(
      entry.layer_id, kv_kind_name(entry.kind), entry.is_draft, entry.addr, entry.num_bytes,
      entry.item_len, entry.token_rows
  );
}

using Pair = std::pair<int64_t, int64_t>;

std::optional<KVRange> range_of(const std::optional<Pair>& pair) {
  return pair ? std::optional(KVRange{pair->first, pair->second}) : std::nullopt;
}

std::optional<Pair> pair_of(const std::optional<KVRange>& range) {
  return range ? std::optional(Pair(range->begin, range->end)) : std::nullopt;
}

std::optional<int64_t> optional_int(py::handle value, const char* name) {
  return value.is_none() ? std::nullopt : std::optional(index_value(value, name));
}

KVLayout make_layout(
    const std::vector<py::tuple>& entries,
    const py::object& page_size,
    const py::object& tp_rank,
    const py::object& tp_size,
    const py::object& total_kv_heads,
    const std::optional<Pair>& layers,
    const py::object& dcp_rank,
    const py::object& dcp_size,
    const py::object& dcp_interleave
) {
  std::vector<KVEntry> values;
  values.reserve(entries.size());
  for (const py::tuple& entry : entries) values.push_back(entry_of(entry));
  return KVLayout(
      std::move(values),
      {
          .page_size = index_value(page_size, "KVLayout: page_size"),
          .tp_rank = index_value(tp_rank, "KVLayout: tp_rank"),
          .tp_size = index_value(tp_size, "KVLayout: tp_size"),
          .total_kv_heads = optional_int(total_kv_heads, "KVLayout: total_kv_heads"),
          .layers = range_of(layers),
          .dcp_rank = index_value(dcp_rank, "KVLayout: dcp_rank"),
          .dcp_size = index_value(dcp_size, "KVLayout: dcp_size"),
          .dcp_interleave = index_value(dcp_interleave, "KVLayout: dcp_interleave"),
      }
  );
}

CpShare share_of(const std::string& name) {
  check(
      name == "pages" || name == "layers",
      "plan_kv_transfer: cp_share must be pages or layers, got \"", name, "\""
  );
  return name == "pages" ? CpShare::pages : CpShare::layers;
}

TransferPlan plan(
    const KVLayout& src,
    const KVLayout& dst,
    const py::object& src_pages,
    const py::object& dst_pages,
    const py::object& num_tokens,
    const py::object& first_token,
    const py::object& src_start,
    const py::object& dst_start,
    const py::object& cp_rank,
    const py::object& cp_size,
    const std::string& cp_share
) {
  const std::vector<int64_t> from = index_list(src_pages, "plan_kv_transfer: src_pages");
  const std::vector<int64_t> to = index_list(dst_pages, "plan_kv_transfer: dst_pages");
  const KVTransferRange range = {
      .src_start = index_value(src_start, "plan_kv_transfer: src_start"),
      .dst_start = index_value(dst_start, "plan_kv_transfer: dst_start"),
      .first_token = optional_int(first_token, "plan_kv_transfer: first_token"),
      .num_tokens = optional_int(num_tokens, "plan_kv_transfer: num_tokens"),
      .cp_rank = index_value(cp_rank, "plan_kv_transfer: cp_rank"),
      .cp_size = index_value(cp_size, "plan_kv_transfer: cp_size"),
      .cp_share = share_of(cp_share),
  };
  const py::gil_scoped_release release;
  return plan_kv_transfer(src, dst, from, to, range);
}

}  // namespace

void register_kv_transfer(py::module_& module) {
  py::class_<KVLayout> type(module, "KVLayout");
  type.def(py::init(&make_layout));
  type.def_property_readonly("_entries", [](const KVLayout& layout) {
    py::list out;
    for (const KVEntry& entry : layout.entries()) out.append(tuple_of(entry));
    return out;
  });
  type.def_property_readonly("layers", [](const KVLayout& layout) {
    return pair_of(layout.placement().layers);
  });
  type.def_property_readonly("total_kv_heads", [](const KVLayout& layout) {
    return layout.placement().total_kv_heads;
  });
  constexpr std::pair<const char*, int64_t KVPlacement::*> kInts[] = {
      {"page_size", &KVPlacement::page_size}, {"tp_rank", &KVPlacement::tp_rank},
      {"tp_size", &KVPlacement::tp_size},     {"dcp_rank", &KVPlacement::dcp_rank},
      {"dcp_size", &KVPlacement::dcp_size},   {"dcp_interleave", &KVPlacement::dcp_interleave},
  };
  for (const auto& [name, member] : kInts) {
    type.def_property_readonly(name, [member = member](const KVLayout& layout) {
      return layout.placement().*member;
    });
  }
  type.def(py::self == py::self);
  module.def("plan_kv_transfer", &plan);
}

}  // namespace cpattn::bindings
