// SPDX-License-Identifier: Apache-2.0
#include "bindings/arguments/tensor_refusal.h"

#include <pybind11/numpy.h>

#include "cpattn/base/dlpack.h"

namespace py = pybind11;

namespace cpattn::bindings {
namespace {

/// An attribute as text, or nothing: attribute access of a refused object may do anything.
std::string text_of(py::handle object, const char* attribute) {
  try {
    return py::str(object.attr(attribute));
  } catch (py::error_already_set& error) {
    if (!error.matches(PyExc_Exception)) throw;
    return "";
  }
}

bool is_true(py::handle object, const char* attribute) {
  return text_of(object, attribute) == "True";
}

}  // namespace

bool is_masked(py::handle object) {
  // Its type derives from numpy.ndarray, so ordinary arrays and other objects end here.
  if (!py::isinstance<py::array>(object) ||
      Py_TYPE(object.ptr()) == py::detail::npy_api::get().PyArray_Type_) {
    return false;
  }
  return py::isinstance(object, py::module_::import("numpy.ma").attr("MaskedArray"));
}

void refuse_masked(py::handle object, const ArgumentName& name) {
  if (!is_masked(object)) return;
  refuse_type(
      name, " is a masked array, whose mask would have no effect; pass a plain one, such as ",
      name.argument, ".filled(0)"
  );
}

void refuse_other_types(py::handle object, const ArgumentName& name) {
  const bool has_buffer = PyObject_CheckBuffer(object.ptr()) != 0;
  refuse_type(
      name, " must be a tensor (torch CPU, NumPy, or anything with __dlpack__), got ",
      type_name(object), has_buffer ? ", which numpy.asarray makes one of" : ""
  );
}

void refuse_device(py::handle object, const ArgumentName& name, int32_t device_type) {
  std::string device = text_of(object, "device");  // with its number, in torch: cuda:0
  if (device.empty()) device = dlpack_device_name(device_type);
  refuse_type(name, " must be on the CPU, got one on ", device, "; pass ", name.argument, ".cpu()");
}

void refuse_dtype(
    py::handle object, const ArgumentName& name, const std::string& dtype, const char* rule
) {
  if (rule != nullptr) refuse_type(name, " must be ", rule, ", got ", dtype);
  const bool is_torch = py::hasattr(object, "layout");
  const char* hint = "";
  if (dtype == "uint16") {
    hint = is_torch ? "; if these are the bits of bfloat16, pass a view(torch.bfloat16)"
                    : "; if these are the bits of bfloat16, pass a view(ml_dtypes.bfloat16)";
  }
  refuse_type(name, " has an unsupported dtype (", dtype, ")", hint);
}

void refuse_torch_kind(py::handle object, const ArgumentName& name) {
  if (is_true(object, "is_nested")) {
    refuse_type(name, " is a nested tensor; pass the rows of all its parts as one plain tensor");
  }
  if (is_true(object, "is_quantized")) {
    refuse_type(name, " is quantized; pass ", name.argument, ".dequantize()");
  }
  const std::string layout = text_of(object, "layout");
  if (!layout.empty() && layout != "torch.strided") {
    refuse_type(name, " must be dense, got ", layout, "; pass ", name.argument, ".to_dense()");
  }
  if (is_true(object, "is_meta")) {
    refuse_type(name, " must be on the CPU, got one on meta, which has no elements");
  }
  refuse_type(name, " must be a dense CPU tensor with storage, got ", type_name(object));
}

}  // namespace cpattn::bindings
