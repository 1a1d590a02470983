// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

#include <string>

namespace cpattn::bindings {

/// " at index 3"; nothing if index < 0: not in a list.
std::string at_index(Py_ssize_t index);

/// The int that a NumPy integer scalar, say, stands for. Anything else, float and bool included,
/// is TypeError.
pybind11::object exact_int(PyObject* object, const char* name, Py_ssize_t index);

/// read() of an int, or of what stands for one.
template <class Read>
auto read_int(PyObject* object, const char* name, Py_ssize_t index, Read read) {
  if (PyLong_CheckExact(object)) return read(object);
  return read(exact_int(object, name, index).ptr());
}

}  // namespace cpattn::bindings
