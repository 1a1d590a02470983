// SPDX-License-Identifier: Apache-2.0
#include "bindings/arguments/int_argument.h"

#include <stdexcept>

#include "bindings/arguments/scalar_argument.h"
#include "cpattn/base/check.h"

namespace py = pybind11;

namespace cpattn::bindings {

std::string at_index(Py_ssize_t index) { return index < 0 ? "" : concat(" at index ", index); }

std::string describe_int(py::handle exact) {
  constexpr int64_t kMaxShownBits = 256;
  const auto bits = exact.attr("bit_length")().cast<int64_t>();
  if (bits > kMaxShownBits) return concat("a number of ", bits, " bits");
  return py::str(exact);
}

py::tuple kept_items(py::handle list_or_tuple) {
  if (PyTuple_Check(list_or_tuple.ptr())) return py::reinterpret_borrow<py::tuple>(list_or_tuple);
  auto items = py::reinterpret_steal<py::tuple>(PyList_AsTuple(list_or_tuple.ptr()));
  if (!items) throw py::error_already_set();
  return items;
}

py::object exact_int(PyObject* object, const ArgumentName& name, Py_ssize_t index) {
  const auto rule = [&] {
    return concat(
        name, index < 0 ? " must be an integer" : " must hold integers", ", got ",
        type_name(object), at_index(index)
    );
  };
  if (is_bool(object) || PyIndex_Check(object) == 0) refuse_type(rule());
  auto exact = py::reinterpret_steal<py::object>(PyNumber_Index(object));
  if (!exact) refuse_for_python_error(rule());
  return exact;
}

int64_t int64_element(PyObject* object, const ArgumentName& name, Py_ssize_t index) {
  return read_int(object, name, index, [&](PyObject* exact) -> int64_t {
    int overflow = 0;
    const long long value = PyLong_AsLongLongAndOverflow(exact, &overflow);
    if (overflow != 0) {
      throw std::invalid_argument(
          concat(name, " must fit into int64, got ", describe_int(exact), at_index(index))
      );
    }
    return value;
  });
}

int64_t index_value(py::handle object, const ArgumentName& name) {
  return int64_element(object.ptr(), name, -1);
}

}  // namespace cpattn::bindings
