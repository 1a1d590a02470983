// SPDX-License-Identifier: Apache-2.0
#include <pybind11/operators.h>

#include <algorithm>
#include <string>
#include <vector>

#include "bindings/arguments/int_argument.h"
#include "bindings/arguments/int_arrays.h"
#include "bindings/arguments/scalar_argument.h"
#include "bindings/arguments/uint64_argument.h"
#include "bindings/module.h"
#include "cpattn/base/check.h"
#include "cpattn/transfer/transfer_plan.h"

namespace py = pybind11;

namespace cpattn::bindings {
namespace {

py::tuple items_of_parts(py::handle object) {
  if (!PyList_Check(object.ptr()) && !PyTuple_Check(object.ptr())) {
    throw py::type_error(concat(
        "TransferPlan: parts must be a list of (name, number of entries, number of blocks), got ",
        Py_TYPE(object.ptr())->tp_name
    ));
  }
  return kept_items(object);
}

TransferPart part_of(py::handle object) {
  const py::tuple fields = items_of_parts(object);
  check(fields.size() == 3, "TransferPlan: parts must have 3 fields each, got ", fields.size());
  return {
      .name = text_value(fields[0], "TransferPlan: parts: name"),
      .num_entries = uint64_value(fields[1], "TransferPlan: parts: number of entries"),
      .num_blocks = uint64_value(fields[2], "TransferPlan: parts: number of blocks"),
  };
}

std::vector<TransferPart> parts_of(py::handle list, std::size_t num_blocks) {
  std::vector<TransferPart> parts;
  std::size_t left = num_blocks;
  for (const py::handle fields : items_of_parts(list)) {
    parts.push_back(part_of(fields));
    check(
        parts.back().num_blocks <= left, "TransferPlan: parts must have the ", num_blocks,
        " blocks of the plan, got more"
    );
    left -= parts.back().num_blocks;
  }
  check(
      parts.empty() || left == 0, "TransferPlan: parts must have the ", num_blocks,
      " blocks of the plan, got ", num_blocks - left
  );
  return parts;
}

TransferPlan make_plan(
    const py::object& src, const py::object& dst, const py::object& bytes, const py::object& parts
) {
  const auto [src_addrs, dst_addrs, lengths] = block_lists("TransferPlan", src, dst, bytes);
  TransferPlan plan(lengths.size());
  std::copy(src_addrs.begin(), src_addrs.end(), plan.src_addrs().begin());
  std::copy(dst_addrs.begin(), dst_addrs.end(), plan.dst_addrs().begin());
  std::copy(lengths.begin(), lengths.end(), plan.lengths().begin());
  plan.set_parts(parts_of(parts, lengths.size()));
  return plan;
}

using Words = std::span<const uint64_t> (TransferPlan::*)() const;

struct Field {
  const char* name;
  Words words;
  const char* doc;
};

constexpr Field kFields[] = {
    {"src_addrs", &TransferPlan::src_addrs, "uint64 array, shape [blocks]: where to read"},
    {"dst_addrs", &TransferPlan::dst_addrs, "uint64 array, shape [blocks]: where to write"},
    {"lengths", &TransferPlan::lengths, "uint64 array, shape [blocks]: bytes of each block"},
};

py::array view(const py::object& self, Words words) {
  return int_view((self.cast<const TransferPlan&>().*words)(), self);
}

py::dict to_dict(const py::object& self) {
  py::dict out;
  for (const Field& field : kFields) out[field.name] = view(self, field.words).attr("tolist")();
  return out;
}

py::list parts(const TransferPlan& plan) {
  py::list out;
  for (const TransferPart& part : plan.parts()) {
    out.append(py::make_tuple(part.name, part.num_entries, part.num_blocks));
  }
  return out;
}

/// The arguments that make an equal plan, parts included.
py::tuple reduce(const py::object& self) {
  py::list arguments;
  for (const Field& field : kFields) arguments.append(view(self, field.words));
  arguments.append(parts(self.cast<const TransferPlan&>()));
  return py::make_tuple(py::type::of(self), py::tuple(arguments));
}

std::string repr(const TransferPlan& plan) {
  std::string text =
      concat("TransferPlan(", plan.num_blocks(), " blocks, ", plan.total_bytes(), " bytes");
  for (const TransferPart& part : plan.parts()) {
    if (!part.name.empty()) text += concat(", ", part.num_entries, " × ", part.name);
  }
  return text + ")";
}

}  // namespace

void register_transfer_plan(py::module_& module) {
  py::class_<TransferPlan> type(
      module, "TransferPlan", py::module_local(),
      "Blocks to copy from one memory to another: a value of three equally long arrays.",
      py::dynamic_attr()  // for the layouts it was made of
  );
  type.def(
      py::init(&make_plan), py::arg("src_addrs"), py::arg("dst_addrs"), py::arg("lengths"),
      py::arg("parts") = py::tuple()
  );
  for (const Field& field : kFields) {
    type.def_property_readonly(
        field.name, [words = field.words](const py::object& self) { return view(self, words); },
        field.doc
    );
  }
  type.def_property_readonly(
      "total_bytes", &TransferPlan::total_bytes, "Bytes of all blocks together."
  );
  type.def_property_readonly(
      "parts", &parts,
      "Blocks that are alike, in order: (name, number of entries, number of blocks)."
  );
  type.def("to_dict", &to_dict, "The three arrays by name, as lists of int; without the parts.");
  type.def("__reduce__", &reduce);
  // A value that keeps the memory it reads alive.
  type.def("__copy__", [](py::object self) { return self; });
  type.def("__deepcopy__", [](py::object self, const py::object&) { return self; });
  type.def("__len__", &TransferPlan::num_blocks);
  type.def("__repr__", &repr);
  type.def(py::self == py::self);
}

}  // namespace cpattn::bindings
