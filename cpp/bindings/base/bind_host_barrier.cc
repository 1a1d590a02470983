// SPDX-License-Identifier: Apache-2.0
#include <pybind11/stl.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "bindings/module.h"
#include "cpattn/base/host_barrier.h"

namespace py = pybind11;
using namespace py::literals;

namespace cpattn::bindings {
namespace {

/// Returns the terms of every rank, a list for each.
py::list meet(
    HostBarrier& self,
    const std::string& call,
    const std::vector<int64_t>& terms,
    double timeout,
    const py::object& give_up
) {
  std::function<bool()> asked;
  if (!give_up.is_none()) {
    asked = [&give_up] {
      const py::gil_scoped_acquire gil;
      return give_up().cast<bool>();
    };
  }
  std::vector<int64_t> all;
  {
    const Computation computation;
    all = self.meet(call, terms, timeout, asked);
  }
  py::list ranks;
  for (int rank = 0; rank < self.size(); ++rank) {
    const auto begin = all.begin() + static_cast<int64_t>(rank * terms.size());
    ranks.append(py::cast(std::vector<int64_t>(begin, begin + std::ssize(terms))));
  }
  return ranks;
}

/// Returns the ranks that the last meeting lost, the reason, and whether it only timed out.
py::tuple loss(const HostBarrier& self) {
  const HostBarrier::Loss& loss = self.loss();
  return py::make_tuple(loss.ranks, loss.reason, loss.timed_out);
}

}  // namespace

void register_host_barrier(py::module_& module) {
  py::class_<HostBarrier>(module, "HostBarrier", py::module_local())
      .def(
          py::init([](int rank, const std::vector<int>& fds, const std::vector<int>& pids,
                      const std::vector<int>& names, int group_size) {
            return std::make_unique<HostBarrier>(rank, fds, pids, names, group_size);
          }),
          "rank"_a, "fds"_a, "pids"_a, "names"_a = std::vector<int>{}, "group_size"_a = 0
      )
      .def("meet", &meet, "call"_a, "terms"_a, "timeout"_a, "give_up"_a = py::none())
      .def("leave", &HostBarrier::leave, "because_of"_a = -1)
      .def("ended", &HostBarrier::ended)
      .def("loss", &loss)
      .def_property_readonly("rank", &HostBarrier::rank)
      .def_property_readonly("size", &HostBarrier::size);
  module.attr("host_barrier_page_bytes") = HostBarrier::kPageBytes;
}

}  // namespace cpattn::bindings
