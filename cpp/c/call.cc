// SPDX-License-Identifier: Apache-2.0
#include "c/call.h"

#include <algorithm>
#include <new>
#include <stdexcept>
#include <string>

#include "cpattn/base/argument_name.h"
#include "cpattn/base/dlpack.h"
#include "cpattn/base/index_view.h"

namespace cpattn::c {
namespace {

thread_local std::string last_error;

// One description of memory under two names: for users, who need no dlpack.h, and for the core.
static_assert(sizeof(cpattn_tensor) == sizeof(dlpack::Tensor));
static_assert(offsetof(cpattn_tensor, data) == offsetof(dlpack::Tensor, data));
static_assert(offsetof(cpattn_tensor, device_type) == offsetof(dlpack::Tensor, device_type));
static_assert(offsetof(cpattn_tensor, device_id) == offsetof(dlpack::Tensor, device_id));
static_assert(offsetof(cpattn_tensor, ndim) == offsetof(dlpack::Tensor, ndim));
static_assert(offsetof(cpattn_tensor, code) == offsetof(dlpack::Tensor, code));
static_assert(offsetof(cpattn_tensor, bits) == offsetof(dlpack::Tensor, bits));
static_assert(offsetof(cpattn_tensor, lanes) == offsetof(dlpack::Tensor, lanes));
static_assert(offsetof(cpattn_tensor, shape) == offsetof(dlpack::Tensor, shape));
static_assert(offsetof(cpattn_tensor, strides) == offsetof(dlpack::Tensor, strides));
static_assert(offsetof(cpattn_tensor, byte_offset) == offsetof(dlpack::Tensor, byte_offset));

/// Reads a tensor. `dtypes`, if not null, names in errors the dtypes that the argument may have.
TensorView read_tensor(
    const cpattn_tensor* given, const ArgumentName& name, const char* dtypes = nullptr
) {
  check(given != nullptr, name, " must be a tensor, got NULL");
  const dlpack::Tensor tensor{
      .data = given->data,
      .device_type = given->device_type,
      .device_id = given->device_id,
      .ndim = given->ndim,
      .code = given->code,
      .bits = given->bits,
      .lanes = given->lanes,
      .shape = given->shape,
      .strides = given->strides,
      .byte_offset = given->byte_offset,
  };
  TensorView view;
  switch (read_dlpack(name, tensor, view)) {
    case DlpackFault::none:
      break;
    case DlpackFault::device:
      check(
          false, name, " must be on the CPU, got one on ", dlpack_device_name(tensor.device_type)
      );
      break;
    case DlpackFault::dtype:
      if (dtypes != nullptr) {
        check(false, name, " must be ", dtypes, ", got ", dlpack_dtype_name(tensor));
      }
      check(false, name, " has an unsupported dtype (", dlpack_dtype_name(tensor), ")");
      break;
    case DlpackFault::description:
      check(false, name, " must be a tensor, got an invalid DLPack description of one");
      break;
    case DlpackFault::storage:
      check(false, name, " has no storage, its data is NULL");
  }
  return view;
}

TensorView read_indices(const cpattn_tensor* given, const ArgumentName& name, int rank) {
  constexpr char kDtypes[] = "int32 or int64";
  const TensorView view = read_tensor(given, name, kDtypes);
  check(
      view.dtype == DType::int32 || view.dtype == DType::int64, name, " must be ", kDtypes,
      ", got ", view.dtype
  );
  check(view.rank == rank, name, " must have ", rank, " dimension(s), got shape ", ShapeOf{view});
  return view;
}

}  // namespace

cpattn_status status_of_exception() noexcept {
  const auto say = [](const char* message, cpattn_status status) {
    try {
      last_error = message;
      return status;
    } catch (...) {  // of a message, there is no memory for it
      last_error.clear();
      return CPATTN_OUT_OF_MEMORY;
    }
  };
  try {
    throw;
  } catch (const std::bad_alloc& error) {
    return say(error.what(), CPATTN_OUT_OF_MEMORY);
  } catch (const std::invalid_argument& error) {
    return say(error.what(), CPATTN_INVALID_ARGUMENT);
  } catch (const std::exception& error) {
    return say(error.what(), CPATTN_RUNTIME_ERROR);
  } catch (...) {
    return say("an exception of an unknown type", CPATTN_RUNTIME_ERROR);
  }
}

TensorView Call::tensor(const cpattn_tensor* given, const char* argument) const {
  return read_tensor(given, {function_, argument});
}

std::optional<TensorView> Call::optional_tensor(
    const cpattn_tensor* given, const char* argument
) const {
  if (given == nullptr) return std::nullopt;
  return tensor(given, argument);
}

std::vector<TensorView> Call::tensors(
    const cpattn_tensor* const* given, int64_t size, const char* argument, const char* size_argument
) const {
  check(size >= 0, function_, ": ", size_argument, " must be >= 0, got ", size);
  check(size == 0 || given != nullptr, function_, ": ", argument, " must not be NULL");
  std::vector<TensorView> views;
  views.reserve(size);
  for (int64_t i = 0; i < size; ++i) {
    views.push_back(tensor(given[i], concat(argument, "[", i, "]").c_str()));
  }
  return views;
}

TensorView Call::output(const cpattn_tensor* given, const char* argument) const {
  const TensorView view = tensor(given, argument);
  check_result({function_, argument}, view);
  return view;
}

std::optional<TensorView> Call::optional_output(
    const cpattn_tensor* given, const char* argument
) const {
  if (given == nullptr) return std::nullopt;
  return output(given, argument);
}

std::vector<int64_t> Call::ints(const cpattn_tensor* given, const char* argument) const {
  return index_values(read_indices(given, {function_, argument}, 1));
}

std::optional<std::vector<int64_t>> Call::optional_ints(
    const cpattn_tensor* given, const char* argument
) const {
  if (given == nullptr) return std::nullopt;
  return ints(given, argument);
}

std::optional<std::vector<double>> Call::optional_reals(
    const cpattn_tensor* given, const char* argument
) const {
  if (given == nullptr) return std::nullopt;
  const ArgumentName name(function_, argument);
  const TensorView view = read_tensor(given, name, "float64");
  check(view.dtype == DType::float64, name, " must be float64, got ", view.dtype);
  check(
      view.rank == 1 && view.is_contiguous(), name,
      " must be contiguous and have 1 dimension, got shape ", ShapeOf{view}
  );
  return std::vector<double>(view.as<double>(), view.as<double>() + view.num_elements());
}

IndexTable Call::table(const cpattn_tensor* given, const char* argument) const {
  return index_table(read_indices(given, {function_, argument}, 2));
}

std::vector<uint8_t> Call::flags(const cpattn_tensor* given, const char* argument) const {
  const ArgumentName name(function_, argument);
  const TensorView view = read_tensor(given, name, "bool");
  check(view.dtype == DType::bool8, name, " must be bool, got ", view.dtype);
  check(
      view.rank == 1 && view.is_contiguous(), name,
      " must be contiguous and have 1 dimension, got shape ", ShapeOf{view}
  );
  std::vector<uint8_t> flags(view.num_elements());
  std::transform(view.as<uint8_t>(), view.as<uint8_t>() + flags.size(), flags.begin(), [](auto x) {
    return x != 0 ? 1 : 0;
  });
  return flags;
}

bool Call::flag(int64_t given, const char* argument) const {
  check(given == 0 || given == 1, function_, ": ", argument, " must be 0 or 1, got ", given);
  return given == 1;
}

std::string_view Call::text(const char* given, const char* argument) const {
  return &object(given, argument);
}

}  // namespace cpattn::c

extern "C" const char* cpattn_last_error() { return cpattn::c::last_error.c_str(); }
