// SPDX-License-Identifier: Apache-2.0
#include "bindings/arguments/index_argument.h"

#include <pybind11/numpy.h>

#include <algorithm>

#include "bindings/arguments/scalar_argument.h"
#include "bindings/gil.h"
#include "cpattn/base/check.h"
#include "cpattn/base/index_view.h"

namespace py = pybind11;

namespace cpattn::bindings {
namespace {

bool is_sequence(py::handle object) {
  return PyList_Check(object.ptr()) || PyTuple_Check(object.ptr());
}

void append_sequence(py::handle object, const ArgumentName& name, std::vector<int64_t>& out) {
  const Py_ssize_t size = PySequence_Fast_GET_SIZE(object.ptr());
  out.reserve(out.size() + size);
  Py_ssize_t i = 0;
  // No Python code runs for an exact int, but without the GIL others may change the list.
  for (; kHasGil && i < size; ++i) {
    PyObject* item = PySequence_Fast_GET_ITEM(object.ptr(), i);
    if (!PyLong_CheckExact(item)) break;
    int overflow = 0;
    const long long value = PyLong_AsLongLongAndOverflow(item, &overflow);
    out.push_back(overflow == 0 ? value : int64_element(item, name, i));  // which throws
  }
  if (i == size) return;
  const py::tuple items = kept_items(object);
  for (; i < PyTuple_GET_SIZE(items.ptr()); ++i) {
    out.push_back(int64_element(PyTuple_GET_ITEM(items.ptr(), i), name, i));
  }
}

TensorArgument index_tensor(py::handle object, const ArgumentName& name, int rank) {
  thread_local PyObject* dlpack = PyUnicode_InternFromString("__dlpack__");
  if (!py::isinstance<py::array>(object) && PyObject_HasAttr(object.ptr(), dlpack) == 0) {
    refuse_type(
        name,
        " must be a list or tuple of int, or a NumPy or torch CPU array of int32 or int64, got ",
        type_name(object)
    );
  }
  constexpr char kDtypes[] = "int32 or int64";
  TensorArgument tensor(object, name, kDtypes);
  if (tensor->dtype != DType::int32 && tensor->dtype != DType::int64) {
    refuse_type(name, " must be ", kDtypes, ", got ", tensor->dtype);
  }
  check(
      tensor->rank == rank, name, " must have ", rank, " dimension(s), got shape ", ShapeOf{*tensor}
  );
  return tensor;
}

}  // namespace

std::vector<int64_t> index_list(py::handle object, const ArgumentName& name) {
  if (!is_sequence(object)) return index_values(*index_tensor(object, name, 1));
  std::vector<int64_t> values;
  append_sequence(object, name, values);
  return values;
}

std::vector<uint8_t> flag_list(py::handle object, const ArgumentName& name) {
  std::vector<uint8_t> flags;
  if (is_sequence(object)) {
    for (const py::handle item : kept_items(object)) flags.push_back(flag_value(item, name));
    return flags;
  }
  thread_local PyObject* dlpack = PyUnicode_InternFromString("__dlpack__");
  if (is_bool(object) || PyObject_HasAttr(object.ptr(), dlpack) == 0) {
    return {flag_value(object, name)};
  }
  const TensorArgument tensor(object, name, "bool");
  if (tensor->dtype != DType::bool8) refuse_type(name, " must be bool, got ", tensor->dtype);
  check(
      tensor->rank == 1 && tensor->is_contiguous(), name,
      " must be contiguous and have 1 dimension, got shape ", ShapeOf{*tensor}
  );
  // A bool that is a view of another byte may be more than 1.
  for (int64_t i = 0; i < tensor->num_elements(); ++i) {
    flags.push_back(tensor->as<uint8_t>()[i] != 0 ? 1 : 0);
  }
  return flags;
}

std::vector<double> real_list(py::handle object, const ArgumentName& name) {
  std::vector<double> values;
  if (is_sequence(object)) {
    for (const py::handle item : kept_items(object)) values.push_back(real_value(item, name));
    return values;
  }
  const TensorArgument tensor(object, name, "float32 or float64");
  const bool narrow = tensor->dtype == DType::float32;
  if (!narrow && tensor->dtype != DType::float64) {
    refuse_type(name, " must be float32 or float64, got ", tensor->dtype);
  }
  check(
      tensor->rank == 1 && tensor->is_contiguous(), name,
      " must be contiguous and have 1 dimension, got shape ", ShapeOf{*tensor}
  );
  if (narrow) return {tensor->as<float>(), tensor->as<float>() + tensor->num_elements()};
  return {tensor->as<double>(), tensor->as<double>() + tensor->num_elements()};
}

std::optional<std::vector<int64_t>> optional_index_list(
    py::handle object, const ArgumentName& name
) {
  if (object.is_none()) return std::nullopt;
  return index_list(object, name);
}

int64_t index_count(py::handle object, const ArgumentName& name) {
  if (is_sequence(object)) return PySequence_Fast_GET_SIZE(object.ptr());
  return index_tensor(object, name, 1)->shape[0];
}

IndexTableArgument::IndexTableArgument(py::handle object, const ArgumentName& name) {
  if (!is_sequence(object)) {
    tensor_.emplace(index_tensor(object, name, 2));
    table_ = index_table(**tensor_);
    return;
  }
  std::vector<std::vector<int64_t>> rows;
  std::size_t columns = 0;
  const py::tuple items = kept_items(object);
  rows.reserve(PyTuple_GET_SIZE(items.ptr()));
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(items.ptr()); ++i) {
    PyObject* row = PyTuple_GET_ITEM(items.ptr(), i);
    if (PyLong_Check(row) != 0) {
      refuse_type(name, " must be a list of lists, a row for each sequence, got int at index ", i);
    }
    rows.push_back(index_list(row, name));
    columns = std::max(columns, rows.back().size());
  }
  owned_.assign(rows.size() * columns, -1);
  for (std::size_t r = 0; r < rows.size(); ++r) {
    std::copy(rows[r].begin(), rows[r].end(), owned_.begin() + r * columns);
  }
  table_ = {
      .data = owned_.data(),
      .is_int64 = true,
      .rows = static_cast<int64_t>(rows.size()),
      .columns = static_cast<int64_t>(columns),
      .row_stride = static_cast<int64_t>(columns)
  };
}

}  // namespace cpattn::bindings
