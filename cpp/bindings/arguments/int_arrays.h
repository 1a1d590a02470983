// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/numpy.h>

#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

namespace cpattn::bindings {

/// A new list of int.
pybind11::list int_list(std::span<const int32_t> values);

/// A read-only NumPy view of `values`, which `owner` keeps alive. NumPy refuses
/// to make it writable, because the owner offers no buffer.
template <class Int>
pybind11::array int_view(std::span<const Int> values, pybind11::handle owner) {
  const auto size = static_cast<pybind11::ssize_t>(values.size());
  pybind11::array array(pybind11::dtype::of<Int>(), {size}, {}, values.data(), owner);
  pybind11::detail::array_proxy(array.ptr())->flags &=
      ~pybind11::detail::npy_api::NPY_ARRAY_WRITEABLE_;
  return array;
}

/// Moves the values to a capsule, and returns their address.
template <class Int>
std::pair<std::span<const Int>, pybind11::capsule> in_capsule(std::vector<Int> values) {
  auto kept = std::make_unique<std::vector<Int>>(std::move(values));
  const std::span<const Int> view = *kept;
  pybind11::capsule owner(kept.get(), [](void* pointer) {
    delete static_cast<std::vector<Int>*>(pointer);
  });
  static_cast<void>(kept.release());  // the capsule deletes it
  return {view, std::move(owner)};
}

/// A read-only NumPy array that owns `values`.
template <class Int>
pybind11::array int_array(std::vector<Int> values) {
  const auto [view, owner] = in_capsule(std::move(values));
  return int_view(view, owner);
}

/// A writable NumPy array that owns `values`: a result that the caller may change.
pybind11::array own_array(std::vector<int64_t> values);

}  // namespace cpattn::bindings
