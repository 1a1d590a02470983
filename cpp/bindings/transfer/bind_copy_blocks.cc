// SPDX-License-Identifier: Apache-2.0
#include <pybind11/stl.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "bindings/arguments/arguments.h"
#include "bindings/arguments/uint64_argument.h"
#include "bindings/module.h"
#include "cpattn/base/check.h"
#include "cpattn/transfer/copy_blocks.h"
#include "cpattn/transfer/memory_ranges.h"
#include "cpattn/transfer/registered_memory.h"

namespace py = pybind11;
using namespace py::literals;

namespace cpattn::bindings {

namespace {

int add(MemoryRanges& self, const py::object& addrs, const py::object& sizes) {
  const std::vector<uint64_t> begins = uint64_list(addrs, "MemoryRanges.add: addrs");
  return self.add(begins, uint64_list(sizes, "MemoryRanges.add: sizes"));
}

int remove(MemoryRanges& self, const py::object& addrs) {
  return self.remove(uint64_list(addrs, "MemoryRanges.remove: addrs"));
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

uint64_t num_bytes(const BlockLists& self) {
  return std::accumulate(self.lengths.begin(), self.lengths.end(), uint64_t{0});
}

/// Returns the owners that keep the sources alive, as far as pools own them.
MemoryOwners source_owners(const BlockLists& self) {
  MemoryOwners owners;
  for (std::size_t i = 0; i < self.src_addrs.size(); ++i) {
    const uint64_t addr = self.src_addrs[i], size = self.lengths[i];
    if (!owners.empty() && owners.back()->contains(addr, size)) continue;  // as usual
    for (auto& memory : PoolMemory::find(addr, size)) owners.push_back(std::move(memory));
  }
  return owners;
}

/// (addresses, sizes, owners of each range): lists that only the engine has.
py::tuple ranges_to_register(
    const std::string& function, const py::object& addrs, const py::object& sizes, bool on_host
) {
  const auto begins = uint64_list(addrs, {function.c_str(), "addrs"});
  const auto lengths = uint64_list(sizes, {function.c_str(), "sizes"});
  check(
      begins.size() == lengths.size(), function, ": addrs and sizes must be equally many, got ",
      begins.size(), " and ", lengths.size()
  );
  const auto owners = own_memory(function.c_str(), begins, lengths, on_host);
  return py::make_tuple(begins, lengths, owners);
}

void copy(const BlockLists& self, py::handle num_threads) {
  const int threads = Arguments("LocalEngine.write").threads(num_threads);
  const Computation computation;
  copy_blocks(self.src_addrs, self.dst_addrs, self.lengths, threads);
}

std::vector<int64_t> differing(const BlockLists& self, py::handle num_threads) {
  const int threads = Arguments("LocalEngine.differing").threads(num_threads);
  const Computation computation;
  return differing_blocks(self.src_addrs, self.dst_addrs, self.lengths, threads);
}

}  // namespace

void register_copy_blocks(py::module_& module) {
  py::class_<MemoryRanges>(module, "MemoryRanges", py::module_local())
      .def(py::init<>())
      .def("add", &add, "addrs"_a, "sizes"_a)
      .def("remove", &remove, "addrs"_a)
      .def("contain", &contain, "addrs"_a, "lengths"_a);
  py::class_<BlockLists>(
      module, "Blocks", py::module_local(),
      "Lists of a write, copied: later changes of them have no effect."
  )
      .def(py::init(&make_blocks), "function"_a, "src_addrs"_a, "dst_addrs"_a, "lengths"_a)
      .def("lie_in", &lie_in, "sources"_a, "targets"_a)
      .def("copy", &copy, "num_threads"_a)
      .def("differing", &differing, "num_threads"_a)
      .def(
          "lists",
          [](const BlockLists& self) {
            return py::make_tuple(self.src_addrs, self.dst_addrs, self.lengths);
          }
      )
      .def("source_owners", &source_owners)
      .def_property_readonly("num_bytes", &num_bytes);
  const py::class_<PoolMemory, std::shared_ptr<PoolMemory>> memory(
      module, "PoolMemory", py::module_local(),
      "Memory of a pool, which lives as long as somebody has this."
  );
  module.def(
      "ranges_to_register", &ranges_to_register, "function"_a, "addrs"_a, "sizes"_a,
      "on_host"_a = true
  );
  module.def(
      "address_list",
      [](const std::string& name, const py::object& addrs) {
        return uint64_list(addrs, name.c_str());
      },
      "name"_a, "addrs"_a, "A list of plain ints in [0, 2^64), read once."
  );
}

}  // namespace cpattn::bindings
