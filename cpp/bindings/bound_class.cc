// SPDX-License-Identifier: Apache-2.0
#include "bindings/bound_class.h"

#include <string>

namespace py = pybind11;

namespace cpattn::bindings {
namespace {

std::string name_of(py::handle type) { return py::str(type.attr("__name__")); }

/// Sets a method that raises TypeError(message) for any arguments.
void set_raising(py::handle type, const char* method, const std::string& message) {
  const py::cpp_function raise(
      [message](const py::args&, const py::kwargs&) { throw py::type_error(message); },
      py::name(method), py::scope(type)
  );
  py::setattr(type, method, py::staticmethod(raise));
}

void close_class(py::handle type) {
  const py::object own = type.attr("__dict__");
  // A class without py::init has pybind11's default __init__, in a slot.
  if (Py_TYPE(py::object(own["__init__"]).ptr()) == &PyWrapperDescr_Type) {
    set_raising(type, "__new__", name_of(type) + " has no constructor; functions make its objects");
  }
  if (!own.contains("__reduce__")) {
    set_raising(
        type, "__reduce__",
        name_of(type) + " cannot be pickled or copied: it belongs to this process"
    );
  }
  // These attributes would let other extensions take its objects, and this one take objects of
  // another copy of itself, whose classes may have other members.
  for (const char* way : {PYBIND11_MODULE_LOCAL_ID, "_pybind11_conduit_v1_"}) {
    py::delattr(type, way);
  }
  auto* raw_type = reinterpret_cast<PyTypeObject*>(type.ptr());
  // pybind11 calls it if a function is given an object without a value.
  py::detail::get_type_info(raw_type)->operator_new = [](std::size_t) -> void* {
    throw py::type_error("this object has no value: it was never constructed");
  };
}

}  // namespace

void close_classes(const py::module_& module) {
  for (const auto& [name, object] : py::dict(module.attr("__dict__"))) {
    const bool is_bound =
        PyType_Check(object.ptr()) && name_of(object.attr("__base__")) == "pybind11_object";
    if (is_bound) close_class(object);
  }
}

void copy_by_reference(py::handle type) {
  const auto same = [](const py::object& self, const py::args&) { return self; };
  for (const char* method : {"__copy__", "__deepcopy__"}) {
    py::setattr(
        type, method, py::cpp_function(same, py::name(method), py::scope(type), py::is_method(type))
    );
  }
}

}  // namespace cpattn::bindings
