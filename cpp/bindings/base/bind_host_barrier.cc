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

/// A list for each rank of what it brought.
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

/// The ranks that the last meeting was in vain for, why, and whether for the time alone.
py::tuple loss(const HostBarrier& self) {
  const HostBarrier::Loss& loss = self.loss();
  return py::make_tuple(loss.ranks, loss.reason, loss.timed_out);
}

}  // namespace

void register_host_barrier(py::module_& module) {
  py::class_<HostBarrier>(module, "HostBarrier")
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
