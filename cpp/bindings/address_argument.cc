// SPDX-License-Identifier: Apache-2.0
#include "bindings/address_argument.h"

#include <string>

#include "cpattn/check.h"

namespace py = pybind11;

namespace cpattn::bindings {
namespace {

uint64_t address(PyObject* object, const char* name, Py_ssize_t index) {
  py::object exact;
  if (!PyLong_CheckExact(object)) {
    if (PyBool_Check(object) || !PyIndex_Check(object)) {
      throw py::type_error(
          concat(name, " must hold integers, got ", Py_TYPE(object)->tp_name, " at index ", index)
      );
    }
    exact = py::reinterpret_steal<py::object>(PyNumber_Index(object));
    if (!exact) throw py::error_already_set();
    object = exact.ptr();
  }
  const unsigned long long value = PyLong_AsUnsignedLongLong(object);
  if (value == static_cast<unsigned long long>(-1) && PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    throw std::invalid_argument(concat(
        name, " must be within [0, 2^64), got ", std::string(py::str(object)), " at index ", index
    ));
  }
  return value;
}

}  // namespace

std::vector<uint64_t> address_list(py::handle object, const char* name) {
  py::object list = py::reinterpret_borrow<py::object>(object);
  if (!PyList_Check(list.ptr()) && !PyTuple_Check(list.ptr())) {
    if (py::hasattr(list, "tolist")) list = list.attr("tolist")();
    if (!PyList_Check(list.ptr())) {
      throw py::type_error(concat(
          name, " must be a list or tuple of int, or an array of integers, got ",
          Py_TYPE(object.ptr())->tp_name
      ));
    }
  }
  PyObject** items = PySequence_Fast_ITEMS(list.ptr());
  const Py_ssize_t size = PySequence_Fast_GET_SIZE(list.ptr());
  std::vector<uint64_t> values;
  values.reserve(size);
  for (Py_ssize_t i = 0; i < size; ++i) values.push_back(address(items[i], name, i));
  return values;
}

}  // namespace cpattn::bindings
