// SPDX-License-Identifier: Apache-2.0
#include <pybind11/stl.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "bindings/module.h"
#include "bindings/num_threads.h"
#include "bindings/uint64_argument.h"
#include "cpattn/copy_blocks.h"
#include "cpattn/memory_ranges.h"

namespace py = pybind11;
using namespace py::literals;

namespace cpattn::bindings {

namespace {

int add(MemoryRanges& self, const py::object& addrs, const py::object& sizes) {
  const std::vector<uint64_t> begins = uint64_list(addrs, "LocalEngine.register: addrs");
  return self.add(begins, uint64_list(sizes, "LocalEngine.register: sizes"));
}

int remove(MemoryRanges& self, const py::object& addrs) {
  return self.remove(uint64_list(addrs, "LocalEngine.unregister: addrs"));
}

bool contain(const MemoryRanges& self, const py::object& addrs, const py::object& lengths) {
  const std::vector<uint64_t> begins = uint64_list(addrs, "MemoryRanges.contain: addrs");
  return self.contain(begins, uint64_list(lengths, "MemoryRanges.contain: lengths"));
}

BlockLists make_blocks(
    const std::string& function,
    const py::object& src_addrs,
    const py::object& dst_addrs,
    const py::object& lengths
) {
  return block_lists(function.c_str(), src_addrs, dst_addrs, lengths);
}

bool lie_in(const BlockLists& self, const MemoryRanges& sources, const MemoryRanges& targets) {
  return sources.contain(self.src_addrs, self.lengths) &&
         targets.contain(self.dst_addrs, self.lengths);
}

void copy(const BlockLists& self, std::optional<int> num_threads) {
  const Computation computation;
  copy_blocks(
      self.src_addrs, self.dst_addrs, self.lengths, parse_threads("LocalEngine.write", num_threads)
  );
}

}  // namespace

void register_copy_blocks(py::module_& module) {
  py::class_<MemoryRanges>(module, "MemoryRanges")
      .def(py::init<>())
      .def("add", &add, "addrs"_a, "sizes"_a)
      .def("remove", &remove, "addrs"_a)
      .def("contain", &contain, "addrs"_a, "lengths"_a);
  py::class_<BlockLists>(
      module, "Blocks", "The lists of a write, read once: who changes them later changes nothing."
  )
      .def(py::init(&make_blocks), "function"_a, "src_addrs"_a, "dst_addrs"_a, "lengths"_a)
      .def("lie_in", &lie_in, "sources"_a, "targets"_a)
      .def("copy", &copy, "num_threads"_a);
  module.def(
      "address_list",
      [](const std::string& name, const py::object& addrs) {
        return uint64_list(addrs, name.c_str());
      },
      "name"_a, "addrs"_a, "A list of plain ints in [0, 2^64), read once."
  );
}

}  // namespace cpattn::bindings
