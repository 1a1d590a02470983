// SPDX-License-Identifier: Apache-2.0
#include "bindings/arguments/scalar_argument.h"

#include <stdexcept>

#include "bindings/arguments/int_argument.h"
#include "bindings/arguments/tensor_refusal.h"
#include "cpattn/base/check.h"

namespace py = pybind11;

namespace cpattn::bindings {
namespace {

bool is_numpy_bool(py::handle object) {
  thread_local const py::handle type =
      py::object(py::module_::import("numpy").attr("bool_")).release();
  return Py_TYPE(object.ptr()) == reinterpret_cast<PyTypeObject*>(type.ptr());
}

/// Whether float() would read the object as a number, not as a container or text.
bool stands_for_a_number(py::handle object) {
  const PyNumberMethods* methods = Py_TYPE(object.ptr())->tp_as_number;
  if (methods == nullptr || (methods->nb_float == nullptr && methods->nb_index == nullptr)) {
    return false;
  }
  if (PyObject_Size(object.ptr()) >= 0) return false;
  PyErr_Clear();  // it has no length, like an array without dimensions
  return true;
}

}  // namespace

bool is_bool(py::handle object) { return PyBool_Check(object.ptr()) || is_numpy_bool(object); }

bool is_number(py::handle object) {
  return PyFloat_Check(object.ptr()) || is_bool(object) || stands_for_a_number(object);
}

double real_value(py::handle object, const ArgumentName& name) {
  if (PyFloat_Check(object.ptr())) return PyFloat_AS_DOUBLE(object.ptr());
  refuse_masked(object, name);
  const auto rule = [&] { return concat(name, " must be a float, got ", type_name(object)); };
  if (is_bool(object) || !stands_for_a_number(object)) refuse_type(rule());
  const double value = PyFloat_AsDouble(object.ptr());
  if (value == -1.0 && PyErr_Occurred() != nullptr) {
    if (PyErr_ExceptionMatches(PyExc_OverflowError) == 0) refuse_for_python_error(rule());
    PyErr_Clear();
    throw std::invalid_argument(concat(name, " must fit into a float, got a larger integer"));
  }
  return value;
}

bool flag_value(py::handle object, const ArgumentName& name) {
  if (object.ptr() == Py_True) return true;
  if (object.ptr() == Py_False) return false;
  if (!is_numpy_bool(object)) refuse_type(name, " must be a bool, got ", type_name(object));
  return PyObject_IsTrue(object.ptr()) == 1;
}

std::optional<KeyWindow> key_window_value(
    py::handle object, bool causal, const ArgumentName& name
) {
  const auto side = [&name](py::handle given) -> std::optional<int64_t> {
    if (given.is_none()) return std::nullopt;
    const int64_t keys = index_value(given, name);
    check(
        keys >= 0, name, " must be >= 0 (0: a token sees itself), got ", keys,
        "; None is a side without a limit"
    );
    return keys;
  };
  if (object.is_none()) return std::nullopt;
  if (PyTuple_Check(object.ptr()) == 0 && PyList_Check(object.ptr()) == 0) {
    const KeyWindow window{.left = side(object), .right = std::nullopt};
    check(
        causal, name, " must be a pair (left, right) unless causal=True, got ", *window.left,
        "; None is a side without a limit"
    );
    return window;
  }
  const py::tuple sides = kept_items(object);
  check(sides.size() == 2, name, " must be a pair (left, right), got ", sides.size(), " items");
  return KeyWindow{.left = side(sides[0]), .right = side(sides[1])};
}

std::string text_value(py::handle object, const ArgumentName& name) {
  if (!PyUnicode_Check(object.ptr())) {
    refuse_type(name, " must be a str, got ", type_name(object));
  }
  Py_ssize_t size = 0;
  const char* text = PyUnicode_AsUTF8AndSize(object.ptr(), &size);
  if (text == nullptr) refuse_for_python_error(concat(name, " must be a str that UTF-8 can hold"));
  constexpr Py_ssize_t kLongest = 200;  // of any name that a function takes
  check(size <= kLongest, name, " must be a name, got a str of ", size, " bytes");
  return {text, static_cast<std::size_t>(size)};
}

}  // namespace cpattn::bindings
