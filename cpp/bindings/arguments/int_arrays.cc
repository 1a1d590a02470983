// SPDX-License-Identifier: Apache-2.0
#include "bindings/arguments/int_arrays.h"

#include "bindings/gil.h"

namespace py = pybind11;

namespace cpattn::bindings {
namespace {

/// A reference to the int. Numbers below the bound are made once, when they first occur, and kept
/// (at most 20 MB): filling a list of token counts and block numbers then only counts references.
/// Without the GIL no number is kept: nothing would guard them, and threads would wait for each
/// other to count.
PyObject* new_int(int32_t value) {
  constexpr int32_t kKept = 1 << 19;
  static PyObject* kept[kKept];
  if (!kHasGil || value < 0 || value >= kKept) return PyLong_FromLong(value);
  PyObject*& slot = kept[value];
  if (slot == nullptr) slot = PyLong_FromLong(value);
  Py_XINCREF(slot);
  return slot;
}

}  // namespace

py::list int_list(std::span<const int32_t> values) {
  auto list = py::reinterpret_steal<py::list>(PyList_New(values.size()));
  if (!list) throw py::error_already_set();
  for (std::size_t i = 0; i < values.size(); ++i) {
    PyObject* item = new_int(values[i]);
    if (item == nullptr) throw py::error_already_set();
    PyList_SET_ITEM(list.ptr(), i, item);
  }
  return list;
}

py::array own_array(std::vector<int64_t> values) {
  const auto [view, owner] = in_capsule(std::move(values));
  return py::array_t<int64_t>(static_cast<py::ssize_t>(view.size()), view.data(), owner);
}

}  // namespace cpattn::bindings
