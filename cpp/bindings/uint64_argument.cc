// SPDX-License-Identifier: Apache-2.0
#include "bindings/uint64_argument.h"

#include <pybind11/numpy.h>

#include <string>

#include "cpattn/check.h"

namespace py = pybind11;

namespace cpattn::bindings {

uint64_t uint64_value(py::handle object, const char* name) {
  if (PyBool_Check(object.ptr()) || !PyIndex_Check(object.ptr())) {
    throw py::type_error(concat(name, " must be an integer, got ", Py_TYPE(object.ptr())->tp_name));
  }
  const auto exact = py::reinterpret_steal<py::object>(PyNumber_Index(object.ptr()));
  if (!exact) throw py::error_already_set();
  const unsigned long long value = PyLong_AsUnsignedLongLong(exact.ptr());
  if (PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    check(false, name, " must be in [0, 2^64), got ", std::string(py::str(exact)));
  }
  return value;
}

std::vector<uint64_t> uint64_list(py::handle object, const char* name) {
  if (py::isinstance<py::array_t<uint64_t>>(object)) {
    const auto array = py::reinterpret_borrow<py::array_t<uint64_t>>(object);
    check(array.ndim() == 1, name, " must have 1 dimension, got ", array.ndim());
    std::vector<uint64_t> values(array.size());
    for (py::ssize_t i = 0; i < array.size(); ++i) values[i] = array.at(i);
    return values;
  }
  if (!PyList_Check(object.ptr()) && !PyTuple_Check(object.ptr())) {
    throw py::type_error(concat(
        name, " must be a list or tuple of int, or a NumPy array of uint64, got ",
        Py_TYPE(object.ptr())->tp_name
    ));
  }
  std::vector<uint64_t> values;
  values.reserve(py::len(object));
  for (const py::handle item : object) values.push_back(uint64_value(item, name));
  return values;
}

}  // namespace cpattn::bindings
