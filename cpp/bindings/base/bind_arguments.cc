// SPDX-License-Identifier: Apache-2.0
#include "bindings/arguments/index_argument.h"
#include "bindings/arguments/scalar_argument.h"
#include "bindings/arguments/tensor_argument.h"
#include "bindings/module.h"
#include "cpattn/base/check.h"

namespace py = pybind11;
using namespace py::literals;

namespace cpattn::bindings {
namespace {

/// A name that Python gives as two str.
class PythonName {
 public:
  PythonName(const py::str& function, const py::str& argument)
      : name_(PyUnicode_AsUTF8(function.ptr()), PyUnicode_AsUTF8(argument.ptr())) {}
  const ArgumentName& operator*() const { return name_; }

 private:
  ArgumentName name_;
};

py::tuple shape_of(
    py::handle tensor, const py::str& function, const py::str& argument, py::handle rank
) {
  const PythonName name(function, argument);
  const TensorArgument view(tensor, *name);
  if (!rank.is_none()) {
    const int64_t wanted = index_value(rank, "shape_of: rank");
    check(
        view->rank == wanted, *name, " must have ", wanted, " dimensions, got shape ",
        ShapeOf{*view}
    );
  }
  py::tuple shape(view->rank);
  for (int axis = 0; axis < view->rank; ++axis) shape[axis] = view->shape[axis];
  return shape;
}

py::str dtype_of(py::handle tensor, const py::str& function, const py::str& argument) {
  return dtype_name(TensorArgument(tensor, *PythonName(function, argument))->dtype);
}

int64_t integer(py::handle value, const py::str& function, const py::str& argument) {
  return index_value(value, *PythonName(function, argument));
}

double real(py::handle value, const py::str& function, const py::str& argument) {
  return real_value(value, *PythonName(function, argument));
}

bool flag(py::handle value, const py::str& function, const py::str& argument) {
  return flag_value(value, *PythonName(function, argument));
}

py::list flags(
    py::handle value, py::handle count, const py::str& function, const py::str& argument
) {
  const PythonName name(function, argument);
  const auto wanted = static_cast<std::size_t>(index_value(count, *name));
  std::vector<uint8_t> flags = flag_list(value, *name);
  if (is_bool(value)) flags.resize(wanted, flags[0]);
  check(
      flags.size() == wanted, *name, " must be a bool or ", wanted,
      " bools, one for each sequence, got ", flags.size()
  );
  py::list out;
  for (const uint8_t flag : flags) out.append(flag != 0);
  return out;
}

py::object key_window(
    py::handle value, py::handle causal, const py::str& function, const py::str& argument
) {
  const bool is_causal = causal.ptr() != Py_False;  // the attention call checks that it is a bool
  const auto window = key_window_value(value, is_causal, *PythonName(function, argument));
  const auto [left, right] = window.value_or(KeyWindow{});
  if (!left && (is_causal || !right)) return py::none();
  return py::make_tuple(left, is_causal ? std::nullopt : right);
}

std::string text(py::handle value, const py::str& function, const py::str& argument) {
  return text_value(value, *PythonName(function, argument));
}

py::list ints(py::handle values, const py::str& function, const py::str& argument) {
  py::list out;
  for (const int64_t value : index_list(values, *PythonName(function, argument))) out.append(value);
  return out;
}

int64_t count(py::handle values, const py::str& function, const py::str& argument) {
  return index_count(values, *PythonName(function, argument));
}

}  // namespace

/// Registers readers for Python functions that use an argument before they pass it on.
void register_arguments(py::module_& module) {
  const auto def = [&module](const char* name, auto* read, const char* doc) {
    module.def(name, read, "value"_a, "function"_a, "argument"_a, doc);
  };
  module.def(
      "shape_of", &shape_of, "tensor"_a, "function"_a, "argument"_a, "rank"_a = py::none(),
      "The shape of a tensor; ValueError if its rank is another."
  );
  def("dtype_of", &dtype_of, "The name of the dtype of a tensor.");
  def("integer", &integer, "An int.");
  def("real", &real, "A float.");
  def("flag", &flag, "A bool.");
  module.def(
      "flags", &flags, "value"_a, "count"_a, "function"_a, "argument"_a,
      "A list of `count` bools: those of a list or tensor, or one bool that all have."
  );
  module.def(
      "key_window", &key_window, "value"_a, "causal"_a, "function"_a, "argument"_a,
      "The sides (left, right) of a window of keys, or None if no key is hidden. Windows that show "
      "the same keys have the same sides."
  );
  def("text", &text, "A str.");
  def("ints", &ints, "The ints of a list or an array of them, read once.");
  def("index_count", &count, "How many ints a list or an array of them has.");
}

}  // namespace cpattn::bindings
