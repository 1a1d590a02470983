// SPDX-License-Identifier: Apache-2.0
#include "bindings/tensor_argument.h"

#include <pybind11/numpy.h>

#include <optional>
#include <string>
#include <unordered_map>
#include <utility>

#include "cpattn/check.h"

namespace py = pybind11;

namespace cpattn::bindings {
namespace {

[[noreturn]] void type_error(const std::string& message) { throw py::type_error(message); }

std::string type_name(py::handle object) { return Py_TYPE(object.ptr())->tp_name; }

std::optional<DType> dtype_from_dlpack(uint8_t code, uint8_t bits) {
  switch (code) {
    case dlpack::kFloat:
      if (bits == 16) return DType::float16;
      if (bits == 32) return DType::float32;
      if (bits == 64) return DType::float64;
      break;
    case dlpack::kBfloat:
      if (bits == 16) return DType::bfloat16;
      break;
    case dlpack::kInt:
      if (bits == 8) return DType::int8;
      if (bits == 32) return DType::int32;
      if (bits == 64) return DType::int64;
      break;
    case dlpack::kUInt:
      if (bits == 8) return DType::uint8;
      break;
    case dlpack::kBool:
      return DType::bool8;
    case dlpack::kFloat8E4M3FN:
      return DType::float8_e4m3fn;
  }
  return std::nullopt;
}

std::optional<DType> dtype_from_name(const std::string& name) {
  for (int i = 0; i <= static_cast<int>(DType::float8_e4m3fn); ++i) {
    if (name == dtype_name(static_cast<DType>(i))) return static_cast<DType>(i);
  }
  return std::nullopt;
}

/// The exchange table of a tensor type, or null. The type is kept alive with
/// its entry, so that an address can never come to mean another type.
const dlpack::ExchangeApi* exchange_api(PyTypeObject* type) {
  static std::unordered_map<PyTypeObject*, const dlpack::ExchangeApi*> cache;
  static PyObject* attribute = PyUnicode_InternFromString("__dlpack_c_exchange_api__");
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

/// What the exchange table passes silently though the numbers would be wrong.
void check_torch_state(py::handle object, const char* name) {
  static PyObject* requires_grad = PyUnicode_InternFromString("requires_grad");
  static PyObject* is_neg = PyUnicode_InternFromString("is_neg");
  PyObject* grad = PyObject_GetAttr(object.ptr(), requires_grad);
  if (grad == nullptr) {
    PyErr_Clear();  // another library's tensor
    return;
  }
  const bool wants_grad = grad == Py_True;
  Py_DECREF(grad);
  if (wants_grad && py::module_::import("torch").attr("is_grad_enabled")().cast<bool>()) {
    type_error(concat(
        name, " requires a gradient, which cpattn does not compute; call it under ",
        "torch.no_grad() or pass ", name, ".detach()"
    ));
  }
  PyObject* neg = PyObject_CallMethodNoArgs(object.ptr(), is_neg);
  if (neg == nullptr) throw py::error_already_set();
  const bool negated = neg == Py_True;
  Py_DECREF(neg);
  if (negated) type_error(concat(name, " is a negated view; pass ", name, ".resolve_neg()"));
}

}  // namespace

TensorArgument::TensorArgument(py::handle object, const char* name) {
  // NumPy before the attribute lookup: a failed lookup costs 300 ns.
  if (!try_numpy(object, name) && !try_exchange_api(object, name)) from_capsule(object, name);
}

TensorArgument::~TensorArgument() {
  if (owner_ != nullptr && owner_->deleter != nullptr) owner_->deleter(owner_);
}

TensorArgument::TensorArgument(TensorArgument&& other) noexcept
    : view_(other.view_), owner_(std::exchange(other.owner_, nullptr)) {}

void TensorArgument::from_dlpack(const dlpack::Tensor& tensor, const char* name) {
  if (tensor.device_type != dlpack::kDeviceCpu) {
    type_error(concat(name, " must be on the CPU, got DLPack device type ", tensor.device_type));
  }
  const auto dtype = dtype_from_dlpack(tensor.code, tensor.bits);
  if (!dtype || tensor.lanes != 1) {
    type_error(concat(
        name, " has an unsupported dtype (DLPack code ", int{tensor.code}, ", ", int{tensor.bits},
        " bits)"
    ));
  }
  check(
      tensor.ndim <= TensorView::kMaxRank, name, " has ", tensor.ndim, " dimensions, at most ",
      TensorView::kMaxRank, " are supported"
  );
  view_.data = static_cast<char*>(tensor.data) + tensor.byte_offset;
  view_.dtype = *dtype;
  view_.rank = tensor.ndim;
  view_.writable = true;
  int64_t contiguous = 1;
  for (int axis = tensor.ndim - 1; axis >= 0; --axis) {
    view_.shape[axis] = tensor.shape[axis];
    view_.strides[axis] = tensor.strides != nullptr ? tensor.strides[axis] : contiguous;
    contiguous *= tensor.shape[axis];
    check(
        view_.strides[axis] >= 0, name, " has a negative stride (", view_.strides[axis],
        ") in dimension ", axis
    );
  }
  if (tensor.data == nullptr && contiguous != 0) {
    type_error(concat(name, " has no storage, as tensors have that only stand for others"));
  }
}

bool TensorArgument::try_exchange_api(py::handle object, const char* name) {
  const auto* api = exchange_api(Py_TYPE(object.ptr()));
  if (api == nullptr) return false;
  dlpack::Tensor tensor;
  if (api->tensor_from_object(object.ptr(), &tensor) != 0) {
    PyErr_Clear();  // meta and sparse tensors: the original text is a C++ stack
    type_error(concat(name, " must be a dense CPU tensor with storage"));
  }
  check_torch_state(object, name);
  from_dlpack(tensor, name);
  return true;
}

bool TensorArgument::try_numpy(py::handle object, const char* name) {
  if (!py::isinstance<py::array>(object)) return false;
  const auto array = py::reinterpret_borrow<py::array>(object);
  const py::dtype dtype = array.dtype();
  static std::unordered_map<int, std::optional<DType>> by_number;
  auto known = by_number.find(dtype.num());
  if (known == by_number.end()) {
    const auto text = dtype.attr("name").cast<std::string>();
    known = by_number.emplace(dtype.num(), dtype_from_name(text)).first;
  }
  if (!known->second) {
    type_error(
        concat(name, " has an unsupported dtype (", dtype.attr("name").cast<std::string>(), ")")
    );
  }
  if (dtype.byteorder() == '>') type_error(concat(name, " is not in native byte order"));
  check(
      array.ndim() <= TensorView::kMaxRank, name, " has ", array.ndim(), " dimensions, at most ",
      TensorView::kMaxRank, " are supported"
  );
  view_.data = const_cast<void*>(array.data());
  view_.dtype = *known->second;
  view_.rank = static_cast<int>(array.ndim());
  view_.writable = array.writeable();
  const auto bytes = static_cast<py::ssize_t>(array.itemsize());
  for (int axis = 0; axis < view_.rank; ++axis) {
    const py::ssize_t stride = array.strides(axis);
    check(
        stride >= 0 && stride % bytes == 0, name, " has a stride of ", stride,
        " bytes in dimension ", axis, ", which must be a non-negative multiple of its ", bytes,
        "-byte elements"
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

void TensorArgument::from_capsule(py::handle object, const char* name) {
  if (!py::hasattr(object, "__dlpack__")) {
    type_error(concat(
        name, " must be a tensor (torch CPU, NumPy, or anything with __dlpack__), got ",
        type_name(object)
    ));
  }
  const py::object result = object.attr("__dlpack__")();
  PyObject* capsule = result.ptr();
  auto* managed = static_cast<dlpack::ManagedTensor*>(PyCapsule_GetPointer(capsule, "dltensor"));
  if (managed == nullptr) throw py::error_already_set();
  PyCapsule_SetName(capsule, "used_dltensor");
  owner_ = managed;
  try {
    from_dlpack(managed->tensor, name);
  } catch (...) {
    // The destructor does not run for a half-constructed object.
    if (managed->deleter != nullptr) managed->deleter(managed);
    throw;
  }
}

TensorArgument output_argument(py::handle object, const char* name) {
  TensorArgument argument(object, name);
  check(argument->writable, name, " must be writable");
  for (int axis = 0; axis < argument->rank; ++axis) {
    check(
        argument->shape[axis] <= 1 || argument->strides[axis] > 0 || argument->num_elements() == 0,
        name, " must not be a broadcast view (stride 0 in dimension ", axis, ")"
    );
  }
  return argument;
}

}  // namespace cpattn::bindings
