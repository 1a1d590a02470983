// SPDX-License-Identifier: Apache-2.0
#include "bindings/arguments/tensor_argument.h"

#include <pybind11/numpy.h>

#include <optional>
#include <string>
#include <unordered_map>
#include <utility>

#include "bindings/arguments/tensor_refusal.h"
#include "cpattn/base/check.h"

// Each thread has caches of its own here; see module.cc.

namespace py = pybind11;

namespace cpattn::bindings {
namespace {

std::optional<DType> dtype_from_name(const std::string& name) {
  for (int i = 0; i <= static_cast<int>(kLastDType); ++i) {
    if (name == dtype_name(static_cast<DType>(i))) return static_cast<DType>(i);
  }
  return std::nullopt;
}

/// The exchange table of a tensor type, or null. The type is kept alive with
/// its entry, so that an address can never come to mean another type.
const dlpack::ExchangeApi* exchange_api(PyTypeObject* type) {
  thread_local std::unordered_map<PyTypeObject*, const dlpack::ExchangeApi*> cache;
  thread_local PyObject* attribute = PyUnicode_InternFromString("__dlpack_c_exchange_api__");
  if (const auto found = cache.find(type); found != cache.end()) return found->second;
  const dlpack::ExchangeApi* api = nullptr;
  PyObject* capsule = PyObject_GetAttr(reinterpret_cast<PyObject*>(type), attribute);
  if (capsule == nullptr) {
    PyErr_Clear();
  } else if (PyCapsule_IsValid(capsule, "dlpack_exchange_api") != 0) {
    const auto* table = static_cast<const dlpack::ExchangeApi*>(
        PyCapsule_GetPointer(capsule, "dlpack_exchange_api")
    );
    if (table->major == 1 && table->tensor_from_object != nullptr) api = table;
  }
  Py_XDECREF(capsule);
  Py_INCREF(type);
  cache.emplace(type, api);
  return api;
}

/// Refuses tensors that the exchange table passes silently though their numbers would be wrong.
void check_torch_state(py::handle object, const ArgumentName& name) {
  thread_local PyObject* requires_grad = PyUnicode_InternFromString("requires_grad");
  thread_local PyObject* is_neg = PyUnicode_InternFromString("is_neg");
  PyObject* grad = PyObject_GetAttr(object.ptr(), requires_grad);
  if (grad == nullptr) {
    PyErr_Clear();  // another library's tensor
    return;
  }
  const bool wants_grad = grad == Py_True;
  Py_DECREF(grad);
  if (wants_grad && py::module_::import("torch").attr("is_grad_enabled")().cast<bool>()) {
    refuse_type(
        name, " requires a gradient, which cpattn does not compute; call it under ",
        "torch.no_grad() or pass ", name.argument, ".detach()"
    );
  }
  PyObject* neg = PyObject_CallMethodNoArgs(object.ptr(), is_neg);
  if (neg == nullptr) {
    PyErr_Clear();  // another library's tensor that has gradients, too
    return;
  }
  const bool negated = neg == Py_True;
  Py_DECREF(neg);
  if (negated) {
    refuse_type(name, " is a negated view; pass ", name.argument, ".resolve_neg()");
  }
}

}  // namespace

struct TensorArgument::Source {
  py::handle object;
  const ArgumentName& name;
  const char* dtypes;
};

TensorArgument::TensorArgument(py::handle object, const ArgumentName& name, const char* dtypes) {
  const Source source{object, name, dtypes};
  // NumPy is tried before the attribute lookup: a failed lookup costs 300 ns.
  if (!try_numpy(source) && !try_exchange_api(source)) from_capsule(source);
}

TensorArgument::~TensorArgument() {
  if (owner_ != nullptr && owner_->deleter != nullptr) owner_->deleter(owner_);
}

TensorArgument::TensorArgument(TensorArgument&& other) noexcept
    : view_(other.view_), owner_(std::exchange(other.owner_, nullptr)) {}

void TensorArgument::from_dlpack(const Source& source, const dlpack::Tensor& tensor) {
  switch (read_dlpack(source.name, tensor, view_)) {
    case DlpackFault::none:
      return;
    case DlpackFault::device:
      refuse_device(source.object, source.name, tensor.device_type);
    case DlpackFault::dtype:
      refuse_dtype(source.object, source.name, dlpack_dtype_name(tensor), source.dtypes);
    case DlpackFault::description:
      refuse_type(source.name, " must be a tensor, got an invalid DLPack description of one");
    case DlpackFault::storage:
      refuse_type(
          source.name, " has no storage, it is a ", type_name(source.object),
          " that only stands for a tensor"
      );
  }
}

bool TensorArgument::try_exchange_api(const Source& source) {
  const auto* api = exchange_api(Py_TYPE(source.object.ptr()));
  if (api == nullptr) return false;
  dlpack::Tensor tensor;
  if (api->tensor_from_object(source.object.ptr(), &tensor) != 0) {
    PyErr_Clear();  // the original text is a C++ stack
    refuse_torch_kind(source.object, source.name);
  }
  check_torch_state(source.object, source.name);
  from_dlpack(source, tensor);
  return true;
}

bool TensorArgument::try_numpy(const Source& source) {
  if (!py::isinstance<py::array>(source.object)) return false;
  const ArgumentName& name = source.name;
  refuse_masked(source.object, name);
  const auto array = py::reinterpret_borrow<py::array>(source.object);
  const py::dtype dtype = array.dtype();
  thread_local std::unordered_map<int, std::optional<DType>> by_number;
  auto known = by_number.find(dtype.num());
  if (known == by_number.end()) {
    const auto text = dtype.attr("name").cast<std::string>();
    known = by_number.emplace(dtype.num(), dtype_from_name(text)).first;
  }
  const auto bytes = static_cast<py::ssize_t>(array.itemsize());
  if (!known->second || bytes != static_cast<py::ssize_t>(element_size(*known->second))) {
    refuse_dtype(source.object, name, dtype.attr("name").cast<std::string>(), source.dtypes);
  }
  if (dtype.byteorder() == '>') {
    refuse_type(
        name, " is not in native byte order; pass ", name.argument, ".astype(", name.argument,
        ".dtype.newbyteorder('='))"
    );
  }
  check_rank(name, array.ndim());
  view_.data = const_cast<void*>(array.data());
  view_.dtype = *known->second;
  view_.rank = static_cast<int>(array.ndim());
  view_.writable = array.writeable();
  for (int axis = 0; axis < view_.rank; ++axis) {
    const py::ssize_t stride = array.strides(axis);
    check(
        stride >= 0, name, " has a negative stride (", stride, " bytes in dimension ", axis,
        "), which is not taken; pass numpy.ascontiguousarray(", name.argument, ")"
    );
    check(
        stride % bytes == 0, name, " has a stride of ", stride, " bytes in dimension ", axis,
        ", which must be a multiple of its ", bytes, "-byte elements"
    );
    view_.shape[axis] = array.shape(axis);
    view_.strides[axis] = stride / bytes;
  }
  check(
      reinterpret_cast<uintptr_t>(view_.data) % bytes == 0, name,
      " is not aligned to its element size"
  );
  return true;
}

void TensorArgument::from_capsule(const Source& source) {
  thread_local PyObject* attribute = PyUnicode_InternFromString("__dlpack__");
  const ArgumentName& name = source.name;
  const auto method =
      py::reinterpret_steal<py::object>(PyObject_GetAttr(source.object.ptr(), attribute));
  if (!method && PyErr_ExceptionMatches(PyExc_AttributeError) != 0) {
    PyErr_Clear();
    refuse_other_types(source.object, name);
  }
  const auto capsule =
      method ? py::reinterpret_steal<py::object>(PyObject_CallNoArgs(method.ptr())) : py::object();
  if (!capsule) {
    refuse_for_python_error(
        concat(name, " must be a tensor, got ", type_name(source.object), " whose __dlpack__ fails")
    );
  }
  if (PyCapsule_IsValid(capsule.ptr(), "dltensor") == 0) {
    refuse_type(
        name, " must be a tensor, got ", type_name(source.object),
        " whose __dlpack__ returns no capsule named dltensor that is yet to be used"
    );
  }
  auto* managed =
      static_cast<dlpack::ManagedTensor*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor"));
  PyCapsule_SetName(capsule.ptr(), "used_dltensor");
  owner_ = managed;
  try {
    check_torch_state(source.object, name);  // torch before 2.10 exports negated views as they are
    from_dlpack(source, managed->tensor);
  } catch (...) {
    // The destructor does not run for a half-constructed object.
    if (managed->deleter != nullptr) managed->deleter(managed);
    throw;
  }
}

TensorArgument output_argument(py::handle object, const ArgumentName& name) {
  TensorArgument argument(object, name);
  check_result(name, *argument);
  return argument;
}

}  // namespace cpattn::bindings
