// SPDX-License-Identifier: Apache-2.0
#include "bindings/uint64_argument.h"

#include <pybind11/numpy.h>

#include <string>

#include "bindings/int_argument.h"
#include "cpattn/check.h"

namespace py = pybind11;

namespace cpattn::bindings {
namespace {

/// index < 0: not in a list.
uint64_t integer(PyObject* object, const char* name, Py_ssize_t index) {
  return read_int(object, name, index, [=](PyObject* exact) -> uint64_t {
    const unsigned long long value = PyLong_AsUnsignedLongLong(exact);
    if (value == static_cast<unsigned long long>(-1) && PyErr_Occurred() != nullptr) {
      PyErr_Clear();
      throw std::invalid_argument(
          concat(name, " must be in [0, 2^64), got ", std::string(py::str(exact)), at_index(index))
      );
    }
    return value;
  });
}

}  // namespace

uint64_t uint64_value(py::handle object, const char* name) {
  return integer(object.ptr(), name, -1);
}

std::vector<uint64_t> uint64_list(py::handle object, const char* name) {
  if (py::isinstance<py::array_t<uint64_t>>(object)) {
    const auto array = py::reinterpret_borrow<py::array_t<uint64_t>>(object);
    check(array.ndim() == 1, name, " must have 1 dimension, got ", array.ndim());
    std::vector<uint64_t> values(array.size());
    for (py::ssize_t i = 0; i < array.size(); ++i) values[i] = array.at(i);
    return values;
  }
  auto list = py::reinterpret_borrow<py::object>(object);
  if (py::hasattr(list, "tolist")) list = list.attr("tolist")();
  if (!PyList_Check(list.ptr()) && !PyTuple_Check(list.ptr())) {
    throw py::type_error(concat(
        name, " must be a list or tuple of int, or an integer array, got ",
        Py_TYPE(object.ptr())->tp_name
    ));
  }
  PyObject** items = PySequence_Fast_ITEMS(list.ptr());
  const Py_ssize_t size = PySequence_Fast_GET_SIZE(list.ptr());
  std::vector<uint64_t> values;
  values.reserve(size);
  for (Py_ssize_t i = 0; i < size; ++i) values.push_back(integer(items[i], name, i));
  return values;
}

}  // namespace cpattn::bindings
