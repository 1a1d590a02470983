// SPDX-License-Identifier: Apache-2.0
#include <pybind11/operators.h>
#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <vector>

#include "bindings/arguments/arguments.h"
#include "bindings/arguments/int_arrays.h"
#include "bindings/bound_class.h"
#include "bindings/module.h"
#include "cpattn/context_parallel/pcp_layout.h"

namespace py = pybind11;

namespace cpattn::bindings {
namespace {

using Layout = PcpLayout;

constexpr BoundMember<Layout, int64_t> kPcpSizes[] = {
    {"pcp_size", &Layout::pcp_size, "Ranks that share prefills."},
    {"dcp_size", &Layout::dcp_size, "Ranks that share the keys of each token."},
    {"num_tokens", &Layout::num_tokens, "New tokens of all requests."},
    {"padded_num_tokens", &Layout::padded_num_tokens, "Rows of each rank, padding included."},
};

Layout pcp_layout_of(
    const Arguments& read,
    py::handle extend_lens,
    py::handle prefix_lens,
    py::handle pcp_size,
    py::handle is_prefill,
    py::handle shard_decode,
    py::handle dcp_size,
    py::handle padded_num_tokens
) {
  const std::vector<int64_t> extend = read.ints(extend_lens, "extend_lens");
  const std::vector<int64_t> prefix = read.ints(prefix_lens, "prefix_lens");
  std::optional<std::vector<uint8_t>> prefills;
  if (!is_prefill.is_none()) prefills = read.flags(is_prefill, "is_prefill");
  return build_pcp_layout(
      {.extend_lens = extend,
       .prefix_lens = prefix,
       .is_prefill = prefills,
       .pcp_size = read.integer(pcp_size, "pcp_size"),
       .dcp_size = read.integer(dcp_size, "dcp_size"),
       .shard_decode = read.flag(shard_decode, "shard_decode"),
       .padded_num_tokens = read.optional_integer(padded_num_tokens, "padded_num_tokens")},
      read.function()
  );
}

/// The columns of the segments of each rank.
template <class... Columns>
py::list by_rank(const Layout& layout, const Columns&... columns) {
  py::list ranks;
  for (int64_t rank = 0; rank < layout.pcp_size; ++rank) {
    const auto of_rank = [&](const Layout::Ints& column) {
      const auto begin = column.begin();
      return int_array<int64_t>(
          {begin + layout.segment_indptr[rank], begin + layout.segment_indptr[rank + 1]}
      );
    };
    ranks.append(py::make_tuple(of_rank(columns)...));
  }
  return ranks;
}

py::list segments(const Layout& layout) {
  return by_rank(
      layout, layout.request, layout.batch_start, layout.batch_stop, layout.rank_start,
      layout.rank_stop
  );
}

py::array flag_array(std::vector<uint8_t> flags) {
  return int_array(std::move(flags)).attr("view")("bool");
}

py::list row_counts(const Layout& layout) {
  py::list counts;
  for (int64_t rank = 0; rank < layout.pcp_size; ++rank) counts.append(layout.num_rows(rank));
  return counts;
}

std::string pcp_repr(const Layout& layout) {
  return concat(
      "PCPLayout(pcp_size=", layout.pcp_size, ", dcp_size=", layout.dcp_size,
      ", num_tokens=", layout.num_tokens, ", padded_num_tokens=", layout.padded_num_tokens,
      ", per_rank_num_tokens=", std::string(py::repr(row_counts(layout))), ")"
  );
}

int64_t pcp_hash(const Layout& layout) {
  ValueHash hash;
  hash << layout.pcp_size << layout.dcp_size << layout.padded_num_tokens;
  hash << std::span<const int64_t>(layout.extend_lens);
  hash << std::span<const int64_t>(layout.prefix_lens);
  return hash.value();
}

/// The arguments that the layout is built from.
py::tuple pcp_state(const Layout& layout) {
  return py::make_tuple(
      layout.extend_lens, layout.prefix_lens, layout.pcp_size,
      std::vector<bool>(layout.is_prefill.begin(), layout.is_prefill.end()), layout.shard_decode,
      layout.dcp_size, layout.padded_num_tokens
  );
}
constexpr std::size_t kPcpStateFields = 7;

Layout restore_pcp_layout(const py::tuple& fields) {
  return pcp_layout_of(
      Arguments("PCPLayout"), fields[0], fields[1], fields[2], fields[3], fields[4], fields[5],
      fields[6]
  );
}

py::list build_segments(
    py::handle extend_lens,
    py::handle prefix_lens,
    py::handle pcp_size,
    py::handle is_prefill,
    py::handle shard_decode,
    py::handle dcp_size
) {
  return segments(pcp_layout_of(
      Arguments("pcp_segments"), extend_lens, prefix_lens, pcp_size, is_prefill, shard_decode,
      dcp_size, py::none()
  ));
}

Layout build_layout(
    py::handle extend_lens,
    py::handle prefix_lens,
    py::handle pcp_size,
    py::handle is_prefill,
    py::handle shard_decode,
    py::handle dcp_size,
    py::handle padded_num_tokens
) {
  return pcp_layout_of(
      Arguments("build_pcp_layout"), extend_lens, prefix_lens, pcp_size, is_prefill, shard_decode,
      dcp_size, padded_num_tokens
  );
}

}  // namespace

// The GIL stays held: a layout takes microseconds.
void register_pcp_layout(py::module_& module) {
  py::class_<Layout> type(module, "PCPLayout", py::module_local());
  for (const auto& field : kPcpSizes) {
    const auto get = [value = field.member](const Layout& layout) { return layout.*value; };
    type.def_property_readonly(field.name, get, field.doc);
  }
  type.def_property_readonly(
      "shard_decode", [](const Layout& layout) { return layout.shard_decode; },
      "Whether each decode has one rank."
  );
  type.def_property_readonly(
      "per_rank_num_tokens", &row_counts, "Rows of each rank that are tokens: list of int."
  );
  type.def_property_readonly(
      "replicated", [](const Layout& layout) { return flag_array(layout.replicated); },
      "Whether all ranks have all new tokens of each request: bool array [bs]."
  );
  type.def("_segments", &segments);
  type.def("_local_q_indices", [](const Layout& layout, int64_t rank) {
    return int_array(local_q_indices(layout, rank));
  });
  type.def_property_readonly(
      "seq_lens",
      [](const Layout& layout) {
        py::list lens;
        for (const py::handle column : by_rank(layout, layout.seq_lens)) {
          lens.append(column.cast<py::tuple>()[0]);
        }
        return lens;
      },
      "Keys that the last token of each segment sees, of each rank: list of int64 arrays."
  );
  type.def_property_readonly(
      "hidden_restore_idx",
      [](const Layout& layout) { return int_array(hidden_restore_idx(layout)); },
      "Padded row of each token of the batch: int64 array, computed on each access."
  );
  type.def_property_readonly(
      "padded_gather_idx",
      [](const Layout& layout) { return int_array(padded_gather_idx(layout)); },
      "Token of each padded row, 0 for padding: int64 array, computed on each access."
  );
  type.def_property_readonly(
      "gathered_kv_write_mask",
      [](const Layout& layout) { return flag_array(gathered_kv_write_mask(layout)); },
      "Whether keys and values of each padded row are written: bool array, computed on each access."
  );
  type.def("__repr__", &pcp_repr);
  type.def(py::self == py::self);
  type.def("__hash__", &pcp_hash);
  define_state(
      module, type, &pcp_state, "restore_pcp_layout", kPcpStateFields, &restore_pcp_layout
  );
  copy_by_reference(type);
  module.def("pcp_segments", &build_segments);
  module.def("build_pcp_layout", &build_layout);
}

}  // namespace cpattn::bindings
