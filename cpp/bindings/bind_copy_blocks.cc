// SPDX-License-Identifier: Apache-2.0
#include <pybind11/stl.h>

#include <cstdint>
#include <vector>

#include "bindings/module.h"
#include "cpattn/copy_blocks.h"
#include "cpattn/memory_ranges.h"

namespace py = pybind11;
using namespace py::literals;

namespace cpattn::bindings {

using Words = std::vector<uint64_t>;

void register_copy_blocks(py::module_& module) {
  py::class_<MemoryRanges>(module, "MemoryRanges")
      .def(py::init<>())
      .def(
          "add",
          [](MemoryRanges& self, const Words& addrs, const Words& sizes) {
            return self.add(addrs, sizes);
          },
          "addrs"_a, "sizes"_a
      )
      .def(
          "remove", [](MemoryRanges& self, const Words& addrs) { return self.remove(addrs); },
          "addrs"_a
      )
      .def(
          "contain",
          [](const MemoryRanges& self, const Words& addrs, const Words& lengths) {
            return self.contain(addrs, lengths);
          },
          "addrs"_a, "lengths"_a
      );
  module.def(
      "copy_blocks",
      [](const Words& src_addrs, const Words& dst_addrs, const Words& lengths, int num_threads) {
        const Computation computation;
        copy_blocks(src_addrs, dst_addrs, lengths, num_threads);
      },
      "src_addrs"_a, "dst_addrs"_a, "lengths"_a, "num_threads"_a
  );
}

}  // namespace cpattn::bindings
