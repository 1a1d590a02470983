// SPDX-License-Identifier: Apache-2.0
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <string>
#include <vector>

#include "bindings/arguments/index_argument.h"
#include "bindings/arguments/int_argument.h"
#include "bindings/arguments/int_arrays.h"
#include "bindings/module.h"
#include "cpattn/kv/placement.h"

namespace py = pybind11;

namespace cpattn::bindings {
namespace {

/// The arguments of a method call of a placement; the method gives its own name and its arguments'
/// names.
class PlacementCall {
 public:
  PlacementCall(
      const Interleave& interleave,
      py::handle values,
      const std::string& function,
      const std::string& argument
  )
      : interleave_(interleave),
        values_(index_list(values, {function.c_str(), argument.c_str()})),
        indices_{.function = function.c_str(), .name = argument.c_str(), .values = values_} {}

  const Interleave& interleave() const { return interleave_; }
  const IndexArgument& indices() const { return indices_; }
  int64_t rank(py::handle rank) const { return index_value(rank, {indices_.function, "rank"}); }

  /// A number for each index, which `fill` writes.
  template <class Fill>
  py::array filled(Fill fill) const {
    py::array_t<int64_t> out(static_cast<py::ssize_t>(values_.size()));
    fill(std::span<int64_t>(out.mutable_data(), values_.size()));
    return out;
  }

 private:
  const Interleave& interleave_;
  std::vector<int64_t> values_;
  IndexArgument indices_;
};

using Name = const std::string&;

Interleave make_interleave(py::handle shard_size, py::handle run_len, Name function, Name run) {
  const Interleave interleave{
      .shard_size = index_value(shard_size, {function.c_str(), "shard_size"}),
      .run_len = index_value(run_len, {function.c_str(), run.c_str()}),
  };
  check_interleave(interleave, function.c_str(), run.c_str());
  return interleave;
}

py::array owners(const Interleave& self, py::handle indices, Name function, Name argument) {
  const PlacementCall call(self, indices, function, argument);
  return call.filled([&](std::span<int64_t> out) { owners_of(self, call.indices(), out); });
}

py::array local(const Interleave& self, py::handle indices, Name function, Name argument) {
  const PlacementCall call(self, indices, function, argument);
  return call.filled([&](std::span<int64_t> out) { local_indices(self, call.indices(), out); });
}

py::tuple share(
    const Interleave& self, py::handle indices, py::handle rank, Name function, Name argument
) {
  const PlacementCall call(self, indices, function, argument);
  LocalShare share = local_share(self, call.indices(), call.rank(rank));
  return py::make_tuple(own_array(std::move(share.positions)), own_array(std::move(share.local)));
}

py::array global(
    const Interleave& self, py::handle rank, py::handle local, Name function, Name argument
) {
  const PlacementCall call(self, local, function, argument);
  const int64_t of_rank = call.rank(rank);
  return call.filled([&](std::span<int64_t> out) {
    global_indices(self, of_rank, call.indices(), out);
  });
}

py::array lens(
    const Interleave& self, py::handle lens, py::handle rank, Name function, Name argument
) {
  const PlacementCall call(self, lens, function, argument);
  const int64_t of_rank = call.rank(rank);
  return call.filled([&](std::span<int64_t> out) {
    local_lens(self, call.indices(), of_rank, out);
  });
}

}  // namespace

// The GIL stays held: these take microseconds.
void register_placement(py::module_& module) {
  py::class_<Interleave>(module, "Interleave", py::module_local())
      .def(py::init(&make_interleave))
      .def_readonly("shard_size", &Interleave::shard_size)
      .def_readonly("run_len", &Interleave::run_len)
      .def("owners_of", &owners)
      .def("local_indices", &local)
      .def("local_share", &share)
      .def("global_indices", &global)
      .def("local_lens", &lens);
}

}  // namespace cpattn::bindings
