// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

#include "bindings/arguments/argument_error.h"
#include "cpattn/base/dlpack.h"
#include "cpattn/base/tensor_view.h"

namespace cpattn::bindings {

/// A Python array as a TensorView, without a copy: a torch CPU tensor, a NumPy
/// array (ml_dtypes included) or anything with __dlpack__. Valid while the
/// Python object lives, which the arguments of a call do.
///
/// Throws TypeError for anything that is not a CPU tensor of a known dtype, for
/// non-native byte order, masked arrays, descriptions that contradict themselves,
/// a torch tensor whose gradient would be lost, and negated views; ValueError for
/// more than 6 dimensions, and for strides that are negative or not whole elements.
class TensorArgument {
 public:
  /// `dtypes`, if not null, names in errors the dtypes that the argument may have.
  TensorArgument(pybind11::handle object, const ArgumentName& name, const char* dtypes = nullptr);
  ~TensorArgument();
  TensorArgument(TensorArgument&& other) noexcept;
  TensorArgument(const TensorArgument&) = delete;
  TensorArgument& operator=(const TensorArgument&) = delete;

  const TensorView& operator*() const { return view_; }
  const TensorView* operator->() const { return &view_; }

 private:
  struct Source;  // what is being read, for errors
  void from_dlpack(const Source& source, const dlpack::Tensor& tensor);
  bool try_exchange_api(const Source& source);
  bool try_numpy(const Source& source);
  void from_capsule(const Source& source);

  TensorView view_;
  dlpack::ManagedTensor* owner_ = nullptr;
};

/// Reads a result as a TensorArgument. It must be writable and must not broadcast (no zero stride
/// over more than one element).
TensorArgument output_argument(pybind11::handle object, const ArgumentName& name);

}  // namespace cpattn::bindings
