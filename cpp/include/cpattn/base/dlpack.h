// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>

#include "cpattn/base/argument_name.h"
#include "cpattn/base/tensor_view.h"

// Mirror of the DLPack C ABI (dmlc/dlpack, version 1.x), as far as CPU tensors
// need it, and of the exchange table that torch >= 2.10 publishes on its tensor
// type as __dlpack_c_exchange_api__: it fills a DLTensor without allocating.
namespace cpattn::dlpack {

constexpr int32_t kDeviceCpu = 1;

enum TypeCode : uint8_t {
  kInt = 0,
  kUInt = 1,
  kFloat = 2,
  kBfloat = 4,
  kBool = 6,
  kFloat8E4M3FN = 10,
  kFloat8E5M2 = 12
};

struct Tensor {
  void* data;
  int32_t device_type;
  int32_t device_id;
  int32_t ndim;
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
  int64_t* shape;
  int64_t* strides;  // in elements; null means contiguous
  uint64_t byte_offset;
};

struct ManagedTensor {
  Tensor tensor;
  void* manager;
  void (*deleter)(ManagedTensor*);
};

struct ExchangeApi {
  uint32_t major;
  uint32_t minor;
  void* previous;
  void* managed_tensor_allocator;
  int (*managed_tensor_from_object)(void*, void**);
  int (*managed_tensor_to_object)(void*, void**);
  int (*tensor_from_object)(void* object, Tensor* out);
  int (*current_work_stream)(int32_t, int32_t, void**);
};

}  // namespace cpattn::dlpack

namespace cpattn {

/// The fault of a DLPack tensor of a caller.
enum class DlpackFault : uint8_t {
  none,
  device,       // it is not on the CPU
  dtype,        // DType lacks it, or it has several lanes
  description,  // it has no extents, or leaves the address space
  storage       // it has elements, but no memory
};

/// Makes a writable `view` of a DLPack tensor. Throws std::invalid_argument, which begins with
/// `name`, for more than 6 dimensions, negative strides and unaligned elements. Returns the other
/// faults, for which callers have their own messages.
DlpackFault read_dlpack(const ArgumentName& name, const dlpack::Tensor& tensor, TensorView& view);

/// The name of a dtype, such as "float64" or "complex64", also of one that DType lacks.
std::string dlpack_dtype_name(const dlpack::Tensor& tensor);
/// The name of a device type, such as "CUDA".
std::string dlpack_device_name(int32_t device_type);

}  // namespace cpattn
