// SPDX-License-Identifier: Apache-2.0
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

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
  for (DType dtype :
       {DType::float32, DType::float16, DType::bfloat16, DType::float8_e4m3fn, DType::float8_e5m2,
        DType::int8, DType::uint8}) {
    if (name == dtype_name(dtype)) return dtype;
  }
  throw std::invalid_argument(concat(
      function,
      ": dtype must be float32, float16, bfloat16, float8_e4m3fn, float8_e5m2, int8 or uint8, got "
      "'",
      name, "'"
  ));
}

std::unique_ptr<KVBuffer> make_buffer(
    const std::string& function,
    const py::object& num_layers,
    const py::object& num_slots,
    const py::object& row_elements,
    const std::string& dtype,
    std::shared_ptr<PoolMemory> memory,
    const std::vector<int>& nodes
) {
  const auto size = [&](const py::object& value, const char* name) {
    return index_value(value, concat(function, ": ", name).c_str());
  };
  const int64_t layers = size(num_layers, "num_layers"), slots = size(num_slots, "token slots"),
                elements = size(row_elements, "elements of a row");
  const DType type = pool_dtype(function, dtype);
  if (!memory) {
    return std::make_unique<KVBuffer>(function.c_str(), layers, slots, elements, type, nodes);
  }
  return std::make_unique<KVBuffer>(
      function.c_str(), layers, slots, elements, type, std::move(memory)
  );
}

/// parts: (fd, offset, num_bytes, own) of each.
std::shared_ptr<PoolMemory> map_shared_memory(
    const std::string& function, const std::vector<std::tuple<int, int64_t, int64_t, bool>>& parts
) {
  std::vector<SharedPart> mapped;
  mapped.reserve(parts.size());
  for (const auto& [fd, offset, num_bytes, own] : parts) {
    mapped.push_back({.fd = fd, .offset = offset, .num_bytes = num_bytes, .own = own});
  }
  const Computation computation;
  return PoolMemory::map(function.c_str(), mapped);
}

py::array bytes_of(const py::object& self) {
  const auto& buffer = self.cast<const KVBuffer&>();
  const auto size = static_cast<py::ssize_t>(buffer.num_bytes());
  return py::array(py::dtype::of<uint8_t>(), {size}, {}, buffer.data(), self);
}

/// k_scale or v_scale: a number for all of the tensor, or a tensor of one for each head, or each
/// token and head.
class PoolScale {
 public:
  PoolScale(const Arguments& read, py::handle object, const char* argument)
      : is_number_(py::isinstance<py::float_>(object)),
        number_(is_number_ ? read.real(object, argument) : 1),
        tensor_(read.optional_tensor(is_number_ ? py::handle(Py_None) : object, argument)) {}

  double number() const { return number_; }
  std::optional<TensorView> tensor() const { return view_of(tensor_); }

 private:
  bool is_number_;
  double number_;
  std::optional<TensorArgument> tensor_;
};

void set_kv_buffer(
    int64_t layer,
    py::handle loc,
    int64_t num_heads,
    const KVBuffer& k_buffer,
    const KVBuffer* k_scale_buffer,
    py::handle k,
    py::handle k_scale,
    const KVBuffer& v_buffer,
    const KVBuffer* v_scale_buffer,
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
  const PoolScale of_k(read, k_scale, "k_scale"), of_v(read, v_scale, "v_scale");
  const KVRows parts[] = {
      {.name = "k",
       .rows = k_rows,
       .buffer = k_buffer,
       .scale = of_k.number(),
       .scales = of_k.tensor(),
       .num_heads = num_heads,
       .scale_buffer = k_scale_buffer},
      {.name = "v",
       .rows = v_rows,
       .buffer = v_buffer,
       .scale = of_v.number(),
       .scales = of_v.tensor(),
       .num_heads = num_heads,
       .scale_buffer = v_scale_buffer},
  };
  const Computation computation;
  write_kv_rows(read.function(), layer, slots, parts);
}

/// Rows of the pool's own dtype, of the kind "k".
void set_kv_rows(int64_t layer, py::handle loc, const KVBuffer& buffer, py::handle k) {
  const Arguments read("set_kv_buffer");
  auto slots = read.ints(loc, "loc");
  const TensorArgument view = read.tensor(k, "k");
  const KVRows part{.name = "k", .rows = *view, .buffer = buffer};
  const Computation computation;
  write_kv_rows(read.function(), layer, slots, {&part, 1});
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
  py::class_<KVBuffer>(module, "KVBuffer", py::module_local())
      .def(
          py::init(&make_buffer), "function"_a, "num_layers"_a, "num_slots"_a, "row_elements"_a,
          "dtype"_a, "memory"_a = std::shared_ptr<PoolMemory>(), "nodes"_a = std::vector<int>()
      )
      .def_property_readonly("bytes", &bytes_of)
      .def_property_readonly(
          "addr", [](const KVBuffer& self) { return reinterpret_cast<uintptr_t>(self.data()); }
      )
      .def_property_readonly("layer_bytes", &KVBuffer::layer_bytes)
      .def_property_readonly("row_bytes", &KVBuffer::row_bytes);
  module.def("map_shared_memory", &map_shared_memory, "function"_a, "parts"_a);
  module.def(
      "set_kv_buffer", &set_kv_buffer, "layer"_a, "loc"_a, "num_heads"_a, "k_buffer"_a,
      "k_scale_buffer"_a, "k"_a, "k_scale"_a, "v_buffer"_a, "v_scale_buffer"_a, "v"_a, "v_scale"_a
  );
  module.def("set_kv_rows", &set_kv_rows, "layer"_a, "loc"_a, "buffer"_a, "k"_a);
  module.def(
      "set_index_k_buffer", &set_index_k_buffer, "layer"_a, "loc"_a, "buffer"_a, "index_k"_a
  );
}

}  // namespace cpattn::bindings
