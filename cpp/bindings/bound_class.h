// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <functional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>

#include "cpattn/base/check.h"

namespace cpattn::bindings {

/// Closes loopholes that pybind11 leaves in the classes of a module. These become a TypeError:
///
/// - cls.__new__(cls) of a class without a constructor;
/// - uses of what cls.__new__(cls) returns for other classes: functions would be given
///   uninitialised memory;
/// - pickle and copy of objects without a __reduce__ of their own: protocols 0 and 1 crash.
void close_classes(const pybind11::module_& module);

/// Makes copies of a class's objects the object itself, for immutable values.
void copy_by_reference(pybind11::handle type);

/// Adds to values a method _state, which returns a tuple of num_fields fields, and to the module a
/// function `restore_name`, which makes an equal value from them. A wrong state is a ValueError.
template <class Value>
void define_state(
    pybind11::module_& module,
    pybind11::class_<Value>& type,
    pybind11::tuple (*state_of)(const Value&),
    const char* restore_name,
    std::size_t num_fields,
    Value (*restore)(const pybind11::tuple&)
) {
  namespace py = pybind11;
  type.def("_state", state_of);
  module.def(restore_name, [num_fields, restore](py::handle state) {
    try {
      if (!PyTuple_Check(state.ptr()) || py::len(state) != num_fields) {
        const std::string name = py::str(py::type::of<Value>().attr("__name__"));
        throw py::type_error(concat(name, ": a state must be a tuple of ", num_fields, " fields"));
      }
      return restore(py::reinterpret_borrow<py::tuple>(state));
    } catch (const py::type_error& error) {
      throw std::invalid_argument(error.what());
    } catch (const py::error_already_set& error) {
      if (!error.matches(PyExc_Exception)) throw;
      throw std::invalid_argument(py::str(error.value()));
    }
  });
}

/// A data member of a class as its property in Python.
template <class Value, class Member>
struct BoundMember {
  const char* name;
  Member Value::* member;
  const char* doc;
};

/// A hash of numbers.
class ValueHash {
 public:
  ValueHash& operator<<(int64_t number) {
    constexpr uint64_t kOdd = 0x9E3779B97F4A7C15;
    value_ = (value_ ^ static_cast<uint64_t>(number)) * kOdd;
    value_ ^= value_ >> 32;
    return *this;
  }
  template <class Int>
  ValueHash& operator<<(std::span<const Int> numbers) {
    const auto* bytes = reinterpret_cast<const char*>(numbers.data());
    const std::size_t hash = std::hash<std::string_view>{}({bytes, numbers.size_bytes()});
    return *this << static_cast<int64_t>(hash);
  }
  int64_t value() const { return static_cast<int64_t>(value_ >> 1); }

 private:
  uint64_t value_ = 0;
};

}  // namespace cpattn::bindings
