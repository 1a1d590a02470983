// SPDX-License-Identifier: Apache-2.0
#include <pybind11/numpy.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

#include "bindings/arguments/arguments.h"
#include "bindings/module.h"
#include "cpattn/base/check.h"
#include "cpattn/kv/kv_pool.h"
#include "cpattn/kv/kv_scatter.h"

namespace py = pybind11;
using namespace py::literals;

namespace cpattn::bindings {
namespace {

DType pool_dtype(const std::string& function, const std::string& name) {
  for (DType dtype : {DType::float32, DType::float16, DType::bfloat16, DType::float8_e4m3fn}) {
    if (name == dtype_name(dtype)) return dtype;
  }
  throw std::invalid_argument(concat(
      function, ": dtype must be float32, float16, bfloat16 or float8_e4m3fn, got '", name, "'"
  ));
}

std::unique_ptr<KVBuffer> make_buffer(
    const std::string& function,
    const py::object& num_layers,
    const py::object& num_slots,
    const py::object& row_elements,
    const std::string& dtype
) {
  const auto size = [&](const py::object& value, const char* name) {
    return index_value(value, concat(function, ": ", name).c_str());
  };
  return std::make_unique<KVBuffer>(
      function.c_str(), size(num_layers, "num_layers"), size(num_slots, "token slots"),
      size(row_elements, "elements of a row"), pool_dtype(function, dtype)
  );
}

py::array bytes_of(const py::object& self) {
  const auto& buffer = self.cast<const KVBuffer&>();
  const auto size = static_cast<py::ssize_t>(buffer.num_bytes());
  return py::array(py::dtype::of<uint8_t>(), {size}, {}, buffer.data(), self);
}

void set_kv_buffer(
    int64_t layer,
    py::handle loc,
    const KVBuffer& k_buffer,
    py::handle k,
    py::handle k_scale,
    const KVBuffer& v_buffer,
    py::handle v,
    py::handle v_scale
) {
  const Arguments read("set_kv_buffer");
  auto slots = read.ints(loc, "loc");
  const TensorArgument k_view = read.tensor(k, "k");
  const auto v_view = read.optional_tensor(v, "v");
  const auto [k_rows, v_rows] =
      v_view ? std::pair(*k_view, **v_view)
             : split_last_dim(
                   read.function(), "k", *k_view, k_buffer.row_elements(), v_buffer.row_elements()
               );
  const KVRows parts[] = {
      {.name = "k", .rows = k_rows, .buffer = k_buffer, .scale = read.real(k_scale, "k_scale")},
      {.name = "v", .rows = v_rows, .buffer = v_buffer, .scale = read.real(v_scale, "v_scale")},
  };
  const Computation computation;
  write_kv_rows(read.function(), layer, slots, parts);
}

void set_index_k_buffer(int64_t layer, py::handle loc, const KVBuffer& buffer, py::handle index_k) {
  const Arguments read("set_index_k_buffer");
  auto slots = read.ints(loc, "loc");
  const TensorArgument view = read.tensor(index_k, "index_k");
  const KVRows part{.name = "index_k", .rows = *view, .buffer = buffer};
  const Computation computation;
  write_kv_rows(read.function(), layer, slots, {&part, 1});
}

}  // namespace

void register_kv_pool(py::module_& module) {
  py::class_<KVBuffer>(module, "KVBuffer")
      .def(
          py::init(&make_buffer), "function"_a, "num_layers"_a, "num_slots"_a, "row_elements"_a,
          "dtype"_a
      )
      .def_property_readonly("bytes", &bytes_of)
      .def_property_readonly(
          "addr", [](const KVBuffer& self) { return reinterpret_cast<uintptr_t>(self.data()); }
      )
      .def_property_readonly("layer_bytes", &KVBuffer::layer_bytes)
      .def_property_readonly("row_bytes", &KVBuffer::row_bytes);
  module.def(
      "set_kv_buffer", &set_kv_buffer, "layer"_a, "loc"_a, "k_buffer"_a, "k"_a, "k_scale"_a,
      "v_buffer"_a, "v"_a, "v_scale"_a
  );
  module.def(
      "set_index_k_buffer", &set_index_k_buffer, "layer"_a, "loc"_a, "buffer"_a, "index_k"_a
  );
}

}  // namespace cpattn::bindings
