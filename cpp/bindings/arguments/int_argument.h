// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>

#include "bindings/arguments/argument_error.h"

namespace cpattn::bindings {

/// " at index 3"; nothing if index < 0: not in a list.
std::string at_index(Py_ssize_t index);

/// The digits of an int, or their number if they are many.
std::string describe_int(pybind11::handle exact);

/// The items of a list or tuple at this moment, in a tuple that keeps them: a list can change
/// while Python code runs, and __index__ of an item is such code.
pybind11::tuple kept_items(pybind11::handle list_or_tuple);

/// The int that a NumPy integer scalar, say, stands for. Anything else, float and bool included,
/// is TypeError.
pybind11::object exact_int(PyObject* object, const ArgumentName& name, Py_ssize_t index);

/// read() of an int, or of what stands for one.
template <class Read>
auto read_int(PyObject* object, const ArgumentName& name, Py_ssize_t index, Read read) {
  if (PyLong_CheckExact(object)) return read(object);
  return read(exact_int(object, name, index).ptr());
}

/// An int as int64, ValueError if it does not fit; index < 0: not in a list.
int64_t int64_element(PyObject* object, const ArgumentName& name, Py_ssize_t index);

/// An int, a NumPy integer scalar or another object with __index__. Anything else is TypeError,
/// float and bool included.
int64_t index_value(pybind11::handle object, const ArgumentName& name);

}  // namespace cpattn::bindings
