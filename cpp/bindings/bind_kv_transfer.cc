// SPDX-License-Identifier: Apache-2.0
#include <pybind11/operators.h>
#include <pybind11/stl.h>

#include <functional>
#include <optional>
#include <string>
#include <type_traits>
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

/// The value of a str or a bool; `cast` would make other types a RuntimeError or convert them.
template <class Type>
Type exactly(py::handle object, const char* name) {
  if (!py::isinstance<Type>(object)) {
    constexpr bool kIsText = std::is_same_v<Type, py::str>;
    throw py::type_error(concat(
        name, kIsText ? " must be a str, got " : " must be a bool, got ",
        Py_TYPE(object.ptr())->tp_name
    ));
  }
  return py::reinterpret_borrow<Type>(object);
}

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
      .kind = kind_of(exactly<py::str>(fields[1], "KVLayout: kind")),
      .is_draft = exactly<py::bool_>(fields[2], "KVLayout: is_draft"),
      .addr = uint64_value(fields[3], "KVLayout: addr"),
      .num_bytes = uint64_value(fields[4], "KVLayout: nbytes"),
      .item_len = uint64_value(fields[5], "KVLayout: item_len"),
      .token_rows = exactly<py::bool_>(fields[6], "KVLayout: token_rows"),
  };
}

py::tuple tuple_of(const KVEntry& entry) {
  return py::make_tuple(
      entry.layer_id, kv_kind_name(entry.kind), entry.is_draft, entry.addr, entry.num_bytes,
      entry.item_len, entry.token_rows
  );
}

using Pair = std::pair<int64_t, int64_t>;

std::optional<KVRange> layers_of(py::handle pair) {
  if (pair.is_none()) return std::nullopt;
  const std::vector<int64_t> values = index_list(pair, "KVLayout: layers");
  check(values.size() == 2, "KVLayout: layers must be a pair, got ", values.size(), " values");
  return KVRange{values[0], values[1]};
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
    const py::object& layers,
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
          .layers = layers_of(layers),
          .dcp_rank = index_value(dcp_rank, "KVLayout: dcp_rank"),
          .dcp_size = index_value(dcp_size, "KVLayout: dcp_size"),
          .dcp_interleave = index_value(dcp_interleave, "KVLayout: dcp_interleave"),
      }
  );
}

KVTransferRange range_of_arguments(const char* function, const py::dict& arguments) {
  const auto name = [function](const char* argument) { return concat(function, ": ", argument); };
  const auto integer = [&](const char* argument) {
    return index_value(arguments[argument], name(argument).c_str());
  };
  const auto optional = [&](const char* argument) {
    return optional_int(arguments[argument], name(argument).c_str());
  };
  const std::string share = exactly<py::str>(arguments["cp_share"], name("cp_share").c_str());
  check(
      share == "pages" || share == "layers", function, ": cp_share must be pages or layers, got \"",
      share, "\""
  );
  return {
      .src_start = integer("src_start"),
      .dst_start = integer("dst_start"),
      .first_token = optional("first_token"),
      .num_tokens = optional("num_tokens"),
      .cp_rank = arguments.contains("cp_rank") ? integer("cp_rank") : 0,
      .cp_size = integer("cp_size"),
      .cp_share = share == "pages" ? CpShare::pages : CpShare::layers,
  };
}

TransferPlan plan_transfer(
    const KVLayout& src,
    const KVLayout& dst,
    const py::object& src_pages,
    const py::object& dst_pages,
    const py::kwargs& range
) {
  const std::vector<int64_t> from = index_list(src_pages, "plan_kv_transfer: src_pages");
  const std::vector<int64_t> to = index_list(dst_pages, "plan_kv_transfer: dst_pages");
  const KVTransferRange tokens = range_of_arguments("plan_kv_transfer", range);
  const py::gil_scoped_release release;
  return plan_kv_transfer(src, dst, from, to, tokens);
}

using Layouts = std::vector<std::reference_wrapper<const KVLayout>>;  // None is a TypeError

/// Layouts with the list of pages that each has.
class Peers {
 public:
  Peers(const Layouts& layouts, const py::list& pages, const char* name) {
    for (const py::handle list : pages) pages_.push_back(index_list(list, name));
    check(
        pages_.size() == layouts.size(), name, " must be a list for each of ", layouts.size(),
        " peers, got ", pages_.size()
    );
    for (std::size_t i = 0; i < layouts.size(); ++i) {
      peers_.push_back({.layout = &layouts[i].get(), .pages = pages_[i]});
    }
  }
  std::vector<KVPeer>& operator*() { return peers_; }

 private:
  std::vector<std::vector<int64_t>> pages_;
  std::vector<KVPeer> peers_;
};

py::list plan_links(
    const Layouts& sources,
    const Layouts& destinations,
    const py::list& src_pages,
    const py::list& dst_pages,
    const py::object& cp_ranks,
    const py::kwargs& range
) {
  Peers from(sources, src_pages, "plan_kv_links: src_pages");
  Peers to(destinations, dst_pages, "plan_kv_links: dst_pages");
  const std::vector<int64_t> ranks = index_list(cp_ranks, "plan_kv_links: cp_ranks");
  check(
      ranks.size() == sources.size(), "plan_kv_links: cp_ranks must be one for each of ",
      sources.size(), " sources, got ", ranks.size()
  );
  for (std::size_t i = 0; i < ranks.size(); ++i) (*from)[i].cp_rank = ranks[i];
  const KVTransferRange tokens = range_of_arguments("plan_kv_links", range);
  std::vector<KVLink> links;
  {
    const py::gil_scoped_release release;
    links = plan_kv_links(*from, *to, tokens);
  }
  py::list out;
  for (KVLink& link : links) {
    const py::object plan = py::cast(std::move(link.plan));
    py::detail::keep_alive_impl(plan, py::cast(sources[link.source].get()));
    out.append(py::make_tuple(link.source, link.destination, plan));
  }
  return out;
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
  // A plan keeps its source, which may keep a pool: engines read there unasked.
  module.def("plan_kv_transfer", &plan_transfer, py::keep_alive<0, 1>());
  module.def("plan_kv_links", &plan_links);
}

}  // namespace cpattn::bindings
