// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

#include <optional>

#include "bindings/dlpack_abi.h"
#include "cpattn/tensor_view.h"

namespace cpattn::bindings {

/// A Python array as a TensorView, without a copy: a torch CPU tensor, a NumPy
/// array (ml_dtypes included) or anything with __dlpack__. Valid while the
/// Python object lives, which the arguments of a call do.
///
/// Throws TypeError for anything that is not a CPU tensor of a known dtype, for
/// non-native byte order, for a torch tensor whose gradient would be lost, and
/// for negated views; ValueError for strides that are not whole elements.
class TensorArgument {
 public:
  TensorArgument(pybind11::handle object, const char* name);
  ~TensorArgument();
  TensorArgument(TensorArgument&& other) noexcept;
  TensorArgument(const TensorArgument&) = delete;
  TensorArgument& operator=(const TensorArgument&) = delete;

  const TensorView& operator*() const { return view_; }
  const TensorView* operator->() const { return &view_; }

 private:
  void from_dlpack(const dlpack::Tensor& tensor, const char* name);
  bool try_exchange_api(pybind11::handle object, const char* name);
  bool try_numpy(pybind11::handle object, const char* name);
  void from_capsule(pybind11::handle object, const char* name);

  TensorView view_;
  dlpack::ManagedTensor* owner_ = nullptr;
};

/// Nothing for None.
inline std::optional<TensorArgument> optional_tensor(pybind11::handle object, const char* name) {
  if (object.is_none()) return std::nullopt;
  return TensorArgument(object, name);
}

/// Like TensorArgument for a result: must be writable and must not broadcast
/// (no zero stride over more than one element).
TensorArgument output_argument(pybind11::handle object, const char* name);

}  // namespace cpattn::bindings
