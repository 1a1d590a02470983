// SPDX-License-Identifier: Apache-2.0
#include "bindings/arguments/argument_error.h"

namespace py = pybind11;

namespace cpattn::bindings {

std::string type_name(py::handle object) { return Py_TYPE(object.ptr())->tp_name; }

void refuse_for_python_error(const std::string& message) {
  const bool may_replace = PyErr_ExceptionMatches(PyExc_Exception) != 0 &&
                           PyErr_ExceptionMatches(PyExc_MemoryError) == 0;
  if (may_replace) py::raise_from(PyExc_TypeError, message.c_str());
  throw py::error_already_set();
}

}  // namespace cpattn::bindings
