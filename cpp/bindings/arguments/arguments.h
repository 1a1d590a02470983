// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

#include <climits>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "bindings/arguments/argument_error.h"
#include "bindings/arguments/index_argument.h"
#include "bindings/arguments/int_argument.h"
#include "bindings/arguments/scalar_argument.h"
#include "bindings/arguments/tensor_argument.h"
#include "cpattn/base/check.h"
#include "cpattn/base/key_window.h"
#include "cpattn/base/kv_axis_order.h"
#include "cpattn/base/parallel.h"

namespace cpattn::bindings {

/// Reads the arguments of a call of `function`. Throws TypeError for an argument that cannot be
/// read and ValueError for one that does not fit; both begin with the names of function and
/// argument, and texts are made only on failure.
///
/// The name must be a constant: the functions of the core keep the pointer.
class Arguments {
 public:
  explicit consteval Arguments(const char* function) : function_(function) {}
  constexpr const char* function() const { return function_; }

  TensorArgument tensor(pybind11::handle object, const char* argument) const {
    return {object, name(argument)};
  }
  std::optional<TensorArgument> optional_tensor(
      pybind11::handle object, const char* argument
  ) const {
    if (object.is_none()) return std::nullopt;
    return tensor(object, argument);
  }
  /// A tensor to write to.
  TensorArgument output(pybind11::handle object, const char* argument) const {
    return output_argument(object, name(argument));
  }
  std::optional<TensorArgument> optional_output(
      pybind11::handle object, const char* argument
  ) const {
    if (object.is_none()) return std::nullopt;
    return output(object, argument);
  }

  std::vector<int64_t> ints(pybind11::handle object, const char* argument) const {
    return index_list(object, name(argument));
  }
  std::optional<std::vector<int64_t>> optional_ints(
      pybind11::handle object, const char* argument
  ) const {
    return optional_index_list(object, name(argument));
  }
  IndexTableArgument table(pybind11::handle object, const char* argument) const {
    return {object, name(argument)};
  }
  std::optional<IndexTableArgument> optional_table(
      pybind11::handle object, const char* argument
  ) const {
    if (object.is_none()) return std::nullopt;
    return table(object, argument);
  }

  template <class Int = int64_t>
  Int integer(pybind11::handle object, const char* argument) const {
    const int64_t value = index_value(object, name(argument));
    check(
        std::in_range<Int>(value), name(argument), " must fit into int", sizeof(Int) * CHAR_BIT,
        ", got ", value
    );
    return static_cast<Int>(value);
  }
  std::optional<int64_t> optional_integer(pybind11::handle object, const char* argument) const {
    if (object.is_none()) return std::nullopt;
    return integer(object, argument);
  }
  std::vector<uint8_t> flags(pybind11::handle object, const char* argument) const {
    return flag_list(object, name(argument));
  }
  std::optional<KeyWindow> window(pybind11::handle object, bool causal) const {
    return key_window_value(object, causal, name("window"));
  }
  double real(pybind11::handle object, const char* argument) const {
    return real_value(object, name(argument));
  }
  std::optional<std::vector<double>> optional_reals(
      pybind11::handle object, const char* argument
  ) const {
    if (object.is_none()) return std::nullopt;
    return real_list(object, name(argument));
  }
  bool flag(pybind11::handle object, const char* argument) const {
    return flag_value(object, name(argument));
  }
  std::string text(pybind11::handle object, const char* argument) const {
    return text_value(object, name(argument));
  }
  KVAxisOrder kv_layout(pybind11::handle object) const {
    return parse_kv_layout(function_, text(object, "kv_layout"));
  }

  /// num_threads in the form of the core: 0 for None.
  int threads(pybind11::handle object) const {
    if (object.is_none()) return 0;
    return check_num_threads(function_, integer<int32_t>(object, "num_threads"));
  }

  /// The value of a bound class.
  template <class Value>
  const Value& value(pybind11::handle object, const char* argument) const {
    pybind11::detail::make_caster<Value> caster;
    bool is_one = false;
    try {
      is_one = caster.load(object, /*convert=*/false);
    } catch (const pybind11::type_error&) {
      refuse_type(name(argument), " must have been constructed, got one of __new__");
    }
    if (!is_one) {
      const auto wanted = pybind11::type::of<Value>().attr("__name__");
      refuse_type(
          name(argument), " must be of type ", std::string(pybind11::str(wanted)), ", got ",
          type_name(object)
      );
    }
    return pybind11::detail::cast_op<const Value&>(caster);
  }
  template <class Value>
  const Value* optional_value(pybind11::handle object, const char* argument) const {
    return object.is_none() ? nullptr : &value<Value>(object, argument);
  }

  ArgumentName name(const char* argument) const { return {function_, argument}; }

 private:
  const char* function_;
};

/// The tensors of a list or tuple, which are kept alive: another thread may change a list.
class TensorListArgument {
 public:
  TensorListArgument(
      const Arguments& read, pybind11::handle list, const char* argument, bool are_written = false
  ) {
    if (!is_list(list)) {
      refuse_type(
          read.name(argument), " must be a list or tuple of tensors, got ", type_name(list)
      );
    }
    kept_ = pybind11::tuple(pybind11::reinterpret_borrow<pybind11::object>(list));
    arguments_.reserve(kept_.size());
    views_.reserve(kept_.size());
    for (std::size_t i = 0; i < kept_.size(); ++i) {
      const std::string name = std::string(argument) + '[' + std::to_string(i) + ']';
      arguments_.push_back(
          are_written ? read.output(kept_[i], name.c_str()) : read.tensor(kept_[i], name.c_str())
      );
      views_.push_back(*arguments_.back());
    }
  }
  static bool is_list(pybind11::handle object) {
    return PyList_Check(object.ptr()) != 0 || PyTuple_Check(object.ptr()) != 0;
  }
  std::span<const TensorView> views() const { return views_; }

 private:
  pybind11::tuple kept_;
  std::vector<TensorArgument> arguments_;
  std::vector<TensorView> views_;
};

/// The view of an optional tensor.
inline std::optional<TensorView> view_of(const std::optional<TensorArgument>& argument) {
  return argument ? std::optional(**argument) : std::nullopt;
}
inline std::optional<IndexTable> view_of(const std::optional<IndexTableArgument>& argument) {
  return argument ? std::optional(**argument) : std::nullopt;
}

}  // namespace cpattn::bindings
