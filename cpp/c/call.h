// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "c/include/cpattn.h"
#include "cpattn/base/check.h"
#include "cpattn/base/index_table.h"
#include "cpattn/base/parallel.h"
#include "cpattn/base/tensor_view.h"

namespace cpattn::c {

/// Sets this thread's message from the exception in flight, and returns its status.
cpattn_status status_of_exception() noexcept;

/// Runs the body of a function of the interface: no exception leaves it.
template <class Body>
cpattn_status guarded(Body body) noexcept {
  try {
    body();
    return CPATTN_OK;
  } catch (...) {
    return status_of_exception();
  }
}

/// The defaults of a struct of options, and its size in the first version of the interface.
template <class Options>
struct Defaults;

/// Reads the arguments of a call of `function`. Throws std::invalid_argument, which begins with the
/// names of function and argument, in the words of Python's interface.
///
/// The name must be a constant: the functions of the core keep the pointer.
class Call {
 public:
  explicit consteval Call(const char* function) : function_(function) {}
  constexpr const char* function() const { return function_; }

  TensorView tensor(const cpattn_tensor* given, const char* argument) const;
  std::optional<TensorView> optional_tensor(const cpattn_tensor* given, const char* argument) const;
  /// Tensors in an array of `size`.
  std::vector<TensorView> tensors(
      const cpattn_tensor* const* given,
      int64_t size,
      const char* argument,
      const char* size_argument
  ) const;
  /// A tensor to write to.
  TensorView output(const cpattn_tensor* given, const char* argument) const;
  std::optional<TensorView> optional_output(const cpattn_tensor* given, const char* argument) const;

  std::vector<int64_t> ints(const cpattn_tensor* given, const char* argument) const;
  std::optional<std::vector<int64_t>> optional_ints(
      const cpattn_tensor* given, const char* argument
  ) const;
  IndexTable table(const cpattn_tensor* given, const char* argument) const;
  /// Bools, each as 0 or 1.
  std::vector<uint8_t> flags(const cpattn_tensor* given, const char* argument) const;

  /// Numbers in float64.
  std::optional<std::vector<double>> optional_reals(
      const cpattn_tensor* given, const char* argument
  ) const;

  bool flag(int64_t given, const char* argument) const;
  std::string_view text(const char* given, const char* argument) const;
  /// A number that may be CPATTN_NONE.
  static std::optional<int64_t> optional_int(int64_t given) {
    return given == CPATTN_NONE ? std::nullopt : std::optional(given);
  }
  /// The option num_threads: for CPATTN_NONE 0, the default of the process.
  int threads(int32_t num_threads) const {
    return num_threads == CPATTN_NONE ? 0 : check_num_threads(function_, num_threads);
  }

  /// Refuses a null pointer to an object that the call needs.
  template <class Object>
  Object& object(Object* given, const char* argument) const {
    check(given != nullptr, function_, ": ", argument, " must not be NULL");
    return *given;
  }

  /// A struct of options. Fields that a caller's older header lacks have their defaults.
  template <class Options>
  Options options(const Options* given, const char* argument) const {
    const std::size_t size = checked_size<Options>(object(given, argument).struct_size, argument);
    Options read = Defaults<Options>::value();
    std::memcpy(&read, given, size);
    return read;
  }

  /// Fills the part of a struct of options that the caller's header has with defaults.
  template <class Options>
  void initialise(Options* options, std::size_t struct_size, const char* argument) const {
    Options defaults = Defaults<Options>::value();
    defaults.struct_size = checked_size<Options>(struct_size, argument);
    std::memcpy(&object(options, argument), &defaults, struct_size);
  }

 private:
  template <class Options>
  std::size_t checked_size(std::size_t size, const char* argument) const {
    constexpr std::size_t kFirst = Defaults<Options>::kFirstSize;
    static_assert(kFirst <= sizeof(Options));
    check(
        size >= kFirst && size <= sizeof(Options), function_, ": ", argument,
        " must have a struct_size from ", kFirst, " to ", sizeof(Options), ", which its _init ",
        "function sets, got ", size
    );
    return size;
  }

  const char* function_;
};

}  // namespace cpattn::c
