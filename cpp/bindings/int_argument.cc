// SPDX-License-Identifier: Apache-2.0
#include "bindings/int_argument.h"

#include "cpattn/check.h"

namespace py = pybind11;

namespace cpattn::bindings {

std::string at_index(Py_ssize_t index) { return index < 0 ? "" : concat(" at index ", index); }

py::object exact_int(PyObject* object, const char* name, Py_ssize_t index) {
  if (PyBool_Check(object) || !PyIndex_Check(object)) {
    throw py::type_error(concat(
        name, index < 0 ? " must be an integer" : " must hold integers", ", got ",
        Py_TYPE(object)->tp_name, at_index(index)
    ));
  }
  auto exact = py::reinterpret_steal<py::object>(PyNumber_Index(object));
  if (!exact) throw py::error_already_set();
  return exact;
}

}  // namespace cpattn::bindings
