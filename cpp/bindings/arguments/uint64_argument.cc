// SPDX-License-Identifier: Apache-2.0
#include "bindings/arguments/uint64_argument.h"

#include <pybind11/numpy.h>

#include "bindings/arguments/int_argument.h"
#include "bindings/arguments/tensor_refusal.h"
#include "cpattn/base/check.h"

namespace py = pybind11;

namespace cpattn::bindings {
namespace {

/// index < 0: not in a list.
uint64_t integer(PyObject* object, const ArgumentName& name, Py_ssize_t index) {
  return read_int(object, name, index, [&](PyObject* exact) -> uint64_t {
    const unsigned long long value = PyLong_AsUnsignedLongLong(exact);
    if (value == static_cast<unsigned long long>(-1) && PyErr_Occurred() != nullptr) {
      PyErr_Clear();
      throw std::invalid_argument(
          concat(name, " must be in [0, 2^64), got ", describe_int(exact), at_index(index))
      );
    }
    return value;
  });
}

[[noreturn]] void refuse(py::handle object, const ArgumentName& name) {
  refuse_type(
      name, " must be a list or tuple of int, or an integer array, got ", type_name(object)
  );
}

/// The elements of a list, a tuple or an array as they are now.
py::tuple items_of(py::handle object, const ArgumentName& name) {
  auto list = py::reinterpret_borrow<py::object>(object);
  if (py::hasattr(list, "tolist") && !PyMemoryView_Check(list.ptr())) {
    try {
      list = list.attr("tolist")();
    } catch (py::error_already_set& error) {
      error.restore();
      refuse_for_python_error(concat(name, " must be a list of int, got ", type_name(object)));
    }
  }
  if (!PyTuple_Check(list.ptr()) && !PyList_Check(list.ptr())) refuse(object, name);
  return kept_items(list);
}

}  // namespace

uint64_t uint64_value(py::handle object, const ArgumentName& name) {
  return integer(object.ptr(), name, -1);
}

std::vector<uint64_t> uint64_list(py::handle object, const ArgumentName& name) {
  if (is_masked(object)) refuse(object, name);  // its numbers would be read as if none were masked
  if (py::isinstance<py::array_t<uint64_t>>(object)) {
    const auto array = py::reinterpret_borrow<py::array_t<uint64_t>>(object);
    check(array.ndim() == 1, name, " must have 1 dimension, got ", array.ndim());
    std::vector<uint64_t> values(array.size());
    for (py::ssize_t i = 0; i < array.size(); ++i) values[i] = array.at(i);
    return values;
  }
  const py::tuple items = items_of(object, name);
  std::vector<uint64_t> values;
  values.reserve(items.size());
  for (std::size_t i = 0; i < items.size(); ++i) {
    values.push_back(integer(PyTuple_GET_ITEM(items.ptr(), i), name, static_cast<Py_ssize_t>(i)));
  }
  return values;
}

BlockLists block_lists(
    const char* function, py::handle src_addrs, py::handle dst_addrs, py::handle lengths
) {
  const auto list = [function](py::handle object, const char* argument) {
    return uint64_list(object, {function, argument});
  };
  BlockLists blocks{
      list(src_addrs, "src_addrs"), list(dst_addrs, "dst_addrs"), list(lengths, "lengths")
  };
  const auto& [src, dst, bytes] = blocks;
  check(
      src.size() == bytes.size() && dst.size() == bytes.size(), function,
      ": src_addrs, dst_addrs and lengths must be equally long, got ", src.size(), ", ", dst.size(),
      " and ", bytes.size()
  );
  uint64_t total = 0;
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    total += bytes[i];
    check(
        total >= bytes[i], function, ": lengths must add up to less than 2^64, got ", bytes[i],
        " at index ", i
    );
  }
  return blocks;
}

}  // namespace cpattn::bindings
