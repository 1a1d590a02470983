// SPDX-License-Identifier: Apache-2.0
#include "cpattn/base/dlpack.h"

#include <optional>
#include <utility>

#include "cpattn/base/check.h"

namespace cpattn {
namespace {

constexpr std::pair<int32_t, const char*> kDevices[] = {
    {2, "CUDA"},
    {3, "CUDA host memory"},
    {4, "OpenCL"},
    {7, "Vulkan"},
    {8, "Metal"},
    {10, "ROCm"},
    {11, "ROCm host memory"},
    {13, "CUDA managed memory"},
    {14, "oneAPI"},
    {15, "WebGPU"},
    {16, "Hexagon"},
    {17, "MAIA"},
};

std::optional<DType> dtype_of(uint8_t code, uint8_t bits) {
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
      if (bits == 8) return DType::bool8;
      break;
    case dlpack::kFloat8E4M3FN:
      if (bits == 8) return DType::float8_e4m3fn;
      break;
    case dlpack::kFloat8E5M2:
      if (bits == 8) return DType::float8_e5m2;
      break;
  }
  return std::nullopt;
}

/// Whether a caller's description of memory has extents and stays within the address space.
bool is_plausible(const dlpack::Tensor& tensor, int64_t element_bytes) {
  if (tensor.ndim < 0 || (tensor.ndim > 0 && tensor.shape == nullptr)) return false;
  int64_t span = 1;
  int64_t elements = 1;
  for (int axis = 0; axis < tensor.ndim; ++axis) {
    const int64_t extent = tensor.shape[axis];
    if (extent < 0 || __builtin_mul_overflow(elements, extent, &elements)) return false;
    int64_t reach = 0;
    if (tensor.strides == nullptr || extent <= 1) continue;
    if (__builtin_mul_overflow(extent - 1, tensor.strides[axis], &reach)) return false;
    if (__builtin_add_overflow(span, reach, &span)) return false;
  }
  if (tensor.strides == nullptr) span = elements;
  int64_t bytes = 0;
  return !__builtin_mul_overflow(span, element_bytes, &bytes) &&
         tensor.byte_offset <= static_cast<uint64_t>(INT64_MAX - bytes);
}

}  // namespace

std::string dlpack_dtype_name(const dlpack::Tensor& tensor) {
  const char* kinds[] = {"int", "uint", "float", "opaque", "bfloat", "complex"};
  const std::string kind = tensor.code < std::size(kinds)
                               ? std::string(kinds[tensor.code])
                               : concat("DLPack code ", int{tensor.code}, ", bits ");
  return concat(kind, int{tensor.bits}, tensor.lanes == 1 ? "" : concat(" x ", tensor.lanes));
}

std::string dlpack_device_name(int32_t device_type) {
  for (const auto& [number, name] : kDevices) {
    if (number == device_type) return name;
  }
  return concat("DLPack device type ", device_type);
}

DlpackFault read_dlpack(const ArgumentName& name, const dlpack::Tensor& tensor, TensorView& view) {
  if (tensor.device_type != dlpack::kDeviceCpu) return DlpackFault::device;
  const auto dtype = dtype_of(tensor.code, tensor.bits);
  if (!dtype || tensor.lanes != 1) return DlpackFault::dtype;
  check_rank(name, tensor.ndim);
  const int64_t bytes = element_size(*dtype);
  if (!is_plausible(tensor, bytes)) return DlpackFault::description;
  view.dtype = *dtype;
  view.rank = tensor.ndim;
  view.writable = true;
  int64_t contiguous = 1;
  for (int axis = tensor.ndim - 1; axis >= 0; --axis) {
    view.shape[axis] = tensor.shape[axis];
    view.strides[axis] = tensor.strides != nullptr ? tensor.strides[axis] : contiguous;
    contiguous *= tensor.shape[axis];
    check(
        view.strides[axis] >= 0, name, " has a negative stride (", view.strides[axis],
        " elements in dimension ", axis, "), which is not taken; pass a contiguous copy"
    );
  }
  if (tensor.data == nullptr && contiguous != 0) return DlpackFault::storage;
  // No pointer arithmetic, because the data of an empty tensor may be null.
  const uintptr_t address = reinterpret_cast<uintptr_t>(tensor.data) + tensor.byte_offset;
  view.data = reinterpret_cast<void*>(address);
  check(contiguous == 0 || address % bytes == 0, name, " is not aligned to its element size");
  return DlpackFault::none;
}

}  // namespace cpattn
