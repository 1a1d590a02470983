// SPDX-License-Identifier: Apache-2.0
#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "bindings/module.h"
#include "cpattn/base/host_barrier.h"

namespace py = pybind11;
using namespace py::literals;

namespace cpattn::bindings {
namespace {

/// A list for each rank of what it brought.
py::list meet(
    HostBarrier& self, const std::string& call, const std::vector<int64_t>& terms, double timeout
) {
  std::vector<int64_t> all;
  {
    const Computation computation;
    all = self.meet(call, terms, timeout);
  }
  py::list ranks;
  for (int rank = 0; rank < self.size(); ++rank) {
    const auto begin = all.begin() + static_cast<int64_t>(rank * terms.size());
    ranks.append(py::cast(std::vector<int64_t>(begin, begin + std::ssize(terms))));
  }
  return ranks;
}

}  // namespace

void register_host_barrier(py::module_& module) {
  py::class_<HostBarrier>(module, "HostBarrier")
      .def(
          py::init([](int rank, const std::vector<int>& fds, const std::vector<int>& pids) {
            return std::make_unique<HostBarrier>(rank, fds, pids);
          }),
          "rank"_a, "fds"_a, "pids"_a
      )
      .def("meet", &meet, "call"_a, "terms"_a, "timeout"_a)
      .def("leave", &HostBarrier::leave)
      .def_property_readonly("rank", &HostBarrier::rank)
      .def_property_readonly("size", &HostBarrier::size);
  module.attr("host_barrier_page_bytes") = HostBarrier::kPageBytes;
}

}  // namespace cpattn::bindings
