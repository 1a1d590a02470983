// SPDX-License-Identifier: Apache-2.0
#include <pybind11/stl.h>

#include <cstdint>
#include <optional>
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
  const std::vector<uint64_t> begins = uint64_list(addrs, "LocalEngine.write: addresses");
  return self.contain(begins, uint64_list(lengths, "LocalEngine.write: lengths"));
}

void copy(
    const py::object& src_addrs,
    const py::object& dst_addrs,
    const py::object& lengths,
    std::optional<int> num_threads
) {
  const std::vector<uint64_t> src = uint64_list(src_addrs, "LocalEngine.write: src_addrs");
  const std::vector<uint64_t> dst = uint64_list(dst_addrs, "LocalEngine.write: dst_addrs");
  const std::vector<uint64_t> bytes = uint64_list(lengths, "LocalEngine.write: lengths");
  const Computation computation;
  copy_blocks(src, dst, bytes, parse_threads("LocalEngine.write", num_threads));
}

}  // namespace

void register_copy_blocks(py::module_& module) {
  py::class_<MemoryRanges>(module, "MemoryRanges")
      .def(py::init<>())
      .def("add", &add, "addrs"_a, "sizes"_a)
      .def("remove", &remove, "addrs"_a)
      .def("contain", &contain, "addrs"_a, "lengths"_a);
  module.def("copy_blocks", &copy, "src_addrs"_a, "dst_addrs"_a, "lengths"_a, "num_threads"_a);
}

}  // namespace cpattn::bindings
