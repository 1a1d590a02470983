// SPDX-License-Identifier: Apache-2.0
#include <pybind11/operators.h>
#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings/arguments/arguments.h"
#include "bindings/arguments/uint64_argument.h"
#include "bindings/module.h"
#include "cpattn/base/check.h"
#include "cpattn/transfer/kv_transfer.h"

namespace py = pybind11;

namespace cpattn::bindings {
namespace {

uint64_t address(py::handle value, const char* argument) {
  return uint64_value(value, {"KVLayout", argument});
}

std::optional<uint64_t> stride_of(py::handle value) {
  return value.is_none() ? std::nullopt : std::optional(address(value, "page_stride"));
}

KVEntry entry_of(const Arguments& read, const py::tuple& fields) {
  return {
      .layer_id = read.integer(fields[0], "layer_id"),
      .kind = parse_kv_kind("KVLayout", read.text(fields[1], "kind")),
      .is_draft = read.flag(fields[2], "is_draft"),
      .addr = address(fields[3], "addr"),
      .num_bytes = address(fields[4], "nbytes"),
      .item_len = address(fields[5], "item_len"),
      .token_rows = read.flag(fields[6], "token_rows"),
      .dtype = read.text(fields[7], "dtype"),
      .page_stride = stride_of(fields[8]),
      .kv_layout = read.kv_layout(fields[9]),
      .layout_tag = read.text(fields[10], "layout_tag"),
  };
}

py::tuple tuple_of(const KVEntry& entry) {
  return py::make_tuple(
      entry.layer_id, kv_kind_name(entry.kind), entry.is_draft, entry.addr, entry.num_bytes,
      entry.item_len, entry.token_rows, entry.dtype, entry.page_stride,
      entry.kv_layout == KVAxisOrder::nhd ? "NHD" : "HND", entry.layout_tag
  );
}

using Pair = std::pair<int64_t, int64_t>;

std::optional<IndexRange> layers_of(const Arguments& read, py::handle pair) {
  if (pair.is_none()) return std::nullopt;
  const std::vector<int64_t> values = read.ints(pair, "layers");
  check(values.size() == 2, read.name("layers"), " must be a pair, got ", values.size(), " values");
  return IndexRange{values[0], values[1]};
}

std::optional<Pair> pair_of(const std::optional<IndexRange>& range) {
  return range ? std::optional(Pair(range->begin, range->end)) : std::nullopt;
}

KVLayout make_layout(
    const std::vector<py::tuple>& entries,
    py::handle page_size,
    py::handle tp_rank,
    py::handle tp_size,
    py::handle total_kv_heads,
    py::handle layers,
    py::handle dcp_rank,
    py::handle dcp_size,
    py::handle dcp_interleave,
    py::handle shard_rank,
    py::handle shard_size
) {
  const Arguments read("KVLayout");
  std::vector<KVEntry> values;
  values.reserve(entries.size());
  for (const py::tuple& entry : entries) values.push_back(entry_of(read, entry));
  return KVLayout(
      std::move(values),
      {
          .page_size = read.integer(page_size, "page_size"),
          .tp_rank = read.integer(tp_rank, "tp_rank"),
          .tp_size = read.integer(tp_size, "tp_size"),
          .total_kv_heads = read.optional_integer(total_kv_heads, "total_kv_heads"),
          .layers = layers_of(read, layers),
          .dcp_rank = read.integer(dcp_rank, "dcp_rank"),
          .dcp_size = read.integer(dcp_size, "dcp_size"),
          .dcp_interleave = read.integer(dcp_interleave, "dcp_interleave"),
          .shard_rank = read.integer(shard_rank, "shard_rank"),
          .shard_size = read.integer(shard_size, "shard_size"),
      }
  );
}

/// Reads the range of sent tokens from the arguments that both planners have.
KVTransferRange range_of(const Arguments& read, const py::dict& arguments) {
  const std::string share = read.text(arguments["cp_share"], "cp_share");
  check(
      share == "pages" || share == "layers", read.name("cp_share"),
      " must be pages or layers, got \"", share, "\""
  );
  return {
      .src_start = read.integer(arguments["src_start"], "src_start"),
      .dst_start = read.integer(arguments["dst_start"], "dst_start"),
      .first_token = read.optional_integer(arguments["first_token"], "first_token"),
      .num_tokens = read.optional_integer(arguments["num_tokens"], "num_tokens"),
      .cp_rank = arguments.contains("cp_rank") ? read.integer(arguments["cp_rank"], "cp_rank") : 0,
      .cp_size = read.integer(arguments["cp_size"], "cp_size"),
      .cp_share = share == "pages" ? CpShare::pages : CpShare::layers,
  };
}

/// A plan that keeps its source alive, which may keep a pool: engines read from it at any time.
/// (py::keep_alive does not fit: it reads a result even if the call was refused.)
py::object with_layouts(TransferPlan plan, py::handle src, py::handle dst) {
  py::object made = py::cast(std::move(plan));
  py::detail::keep_alive_impl(made, src);
  made.attr("layouts") = py::make_tuple(src, dst);
  return made;
}

py::object plan_transfer(
    py::handle src,
    py::handle dst,
    py::handle src_pages,
    py::handle dst_pages,
    const py::kwargs& range
) {
  const Arguments read("plan_kv_transfer");
  const auto& source = read.value<KVLayout>(src, "src");
  const auto& target = read.value<KVLayout>(dst, "dst");
  const std::vector<int64_t> from = read.ints(src_pages, "src_pages");
  const std::vector<int64_t> to = read.ints(dst_pages, "dst_pages");
  const KVTransferRange tokens = range_of(read, range);
  TransferPlan plan;
  {
    const GilRelease nogil;
    plan = plan_kv_transfer(source, target, from, to, tokens);
  }
  return with_layouts(std::move(plan), src, dst);
}

/// Layouts with the list of pages that each has.
class Peers {
 public:
  Peers(
      const Arguments& read,
      const py::tuple& layouts,
      const char* layouts_name,
      const py::tuple& pages,
      const char* pages_name
  ) {
    check(
        pages.size() == layouts.size(), read.name(pages_name), " must be a list for each of ",
        layouts.size(), " peers, got ", pages.size()
    );
    for (const py::handle list : pages) pages_.push_back(read.ints(list, pages_name));
    for (std::size_t i = 0; i < layouts.size(); ++i) {
      const auto& layout = read.value<KVLayout>(layouts[i], layouts_name);
      peers_.push_back({.layout = &layout, .pages = pages_[i]});
    }
  }
  std::vector<KVPeer>& operator*() { return peers_; }

 private:
  std::vector<std::vector<int64_t>> pages_;
  std::vector<KVPeer> peers_;
};

py::list plan_links(
    const py::tuple& sources,
    const py::tuple& destinations,
    const py::tuple& src_pages,
    const py::tuple& dst_pages,
    py::handle cp_ranks,
    const py::kwargs& range
) {
  const Arguments read("plan_kv_links");
  Peers from(read, sources, "sources", src_pages, "src_pages");
  Peers to(read, destinations, "destinations", dst_pages, "dst_pages");
  const std::vector<int64_t> ranks = read.ints(cp_ranks, "cp_ranks");
  check(
      ranks.size() == sources.size(), read.name("cp_ranks"), " must be one for each of ",
      sources.size(), " sources, got ", ranks.size()
  );
  for (std::size_t i = 0; i < ranks.size(); ++i) (*from)[i].cp_rank = ranks[i];
  const KVTransferRange tokens = range_of(read, range);
  std::vector<KVLink> links;
  {
    const GilRelease nogil;
    links = plan_kv_links(*from, *to, tokens);
  }
  py::list out;
  for (KVLink& link : links) {
    const py::object plan =
        with_layouts(std::move(link.plan), sources[link.source], destinations[link.destination]);
    out.append(py::make_tuple(link.source, link.destination, plan));
  }
  return out;
}

}  // namespace

void register_kv_transfer(py::module_& module) {
  py::class_<KVLayout> type(module, "KVLayout", py::module_local());
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
      {"page_size", &KVPlacement::page_size},   {"tp_rank", &KVPlacement::tp_rank},
      {"tp_size", &KVPlacement::tp_size},       {"dcp_rank", &KVPlacement::dcp_rank},
      {"dcp_size", &KVPlacement::dcp_size},     {"dcp_interleave", &KVPlacement::dcp_interleave},
      {"shard_rank", &KVPlacement::shard_rank}, {"shard_size", &KVPlacement::shard_size},
  };
  for (const auto& [name, member] : kInts) {
    type.def_property_readonly(name, [member = member](const KVLayout& layout) {
      return layout.placement().*member;
    });
  }
  type.def(py::self == py::self);
  module.def("plan_kv_transfer", &plan_transfer);
  module.def("plan_kv_links", &plan_links);
}

}  // namespace cpattn::bindings
