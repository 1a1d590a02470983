// SPDX-License-Identifier: Apache-2.0
#include "bindings/index_argument.h"

#include <algorithm>
#include <string>

#include "bindings/int_argument.h"
#include "cpattn/check.h"

namespace py = pybind11;

namespace cpattn::bindings {
namespace {

bool is_sequence(py::handle object) {
  return PyList_Check(object.ptr()) || PyTuple_Check(object.ptr());
}

/// The value of an int or of a NumPy integer scalar; index < 0: not in a list.
int64_t integer(PyObject* object, const char* name, Py_ssize_t index) {
  return read_int(object, name, index, [=](PyObject* exact) -> int64_t {
    int overflow = 0;
    const long long value = PyLong_AsLongLongAndOverflow(exact, &overflow);
    if (overflow != 0) {
      throw std::invalid_argument(
          concat(name, " must fit into int64, got ", std::string(py::str(exact)), at_index(index))
      );
    }
    return value;
  });
}

void append_sequence(py::handle object, const char* name, std::vector<int64_t>& out) {
  PyObject** items = PySequence_Fast_ITEMS(object.ptr());
  const Py_ssize_t size = PySequence_Fast_GET_SIZE(object.ptr());
  out.reserve(out.size() + size);
  for (Py_ssize_t i = 0; i < size; ++i) out.push_back(integer(items[i], name, i));
}

TensorArgument index_tensor(py::handle object, const char* name, int rank) {
  if (!py::hasattr(object, "__dlpack__")) {
    throw py::type_error(concat(
        name,
        " must be a list or tuple of int, or a NumPy or torch CPU array of int32 or int64, got ",
        Py_TYPE(object.ptr())->tp_name
    ));
  }
  TensorArgument tensor(object, name);
  if (tensor->dtype != DType::int32 && tensor->dtype != DType::int64) {
    throw py::type_error(concat(name, " must be int32 or int64, got ", tensor->dtype));
  }
  check(
      tensor->rank == rank, name, " must have ", rank, " dimension(s), got shape ", ShapeOf{*tensor}
  );
  return tensor;
}

IndexTable view_table(const TensorView& tensor) {
  return {
      .data = tensor.data,
      .is_int64 = tensor.dtype == DType::int64,
      .rows = tensor.shape[0],
      .columns = tensor.shape[1],
      .row_stride = tensor.strides[0],
      .column_stride = tensor.strides[1]
  };
}

}  // namespace

int64_t index_value(py::handle object, const char* name) { return integer(object.ptr(), name, -1); }

std::vector<int64_t> index_list(py::handle object, const char* name) {
  std::vector<int64_t> values;
  if (is_sequence(object)) {
    append_sequence(object, name, values);
    return values;
  }
  const TensorArgument tensor = index_tensor(object, name, 1);
  values.resize(tensor->shape[0]);
  const int64_t stride = tensor->strides[0];
  for (int64_t i = 0; i < tensor->shape[0]; ++i) {
    values[i] = tensor->dtype == DType::int64 ? tensor->as<int64_t>()[i * stride]
                                              : tensor->as<int32_t>()[i * stride];
  }
  return values;
}

std::optional<std::vector<int64_t>> optional_index_list(py::handle object, const char* name) {
  if (object.is_none()) return std::nullopt;
  return index_list(object, name);
}

IndexTableArgument::IndexTableArgument(py::handle object, const char* name) {
  if (!is_sequence(object)) {
    tensor_.emplace(index_tensor(object, name, 2));
    table_ = view_table(**tensor_);
    return;
  }
  std::vector<std::vector<int64_t>> rows;
  std::size_t columns = 0;
  for (py::handle row : object) {
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
