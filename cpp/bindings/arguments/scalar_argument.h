// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

#include <optional>
#include <string>

#include "bindings/arguments/argument_error.h"
#include "cpattn/base/key_window.h"

namespace cpattn::bindings {

/// Whether an object is a bool, of Python or NumPy.
bool is_bool(pybind11::handle object);

/// Whether real_value() takes an object, or refuses it as the wrong kind of number.
bool is_number(pybind11::handle object);

/// A float, an int or a number of NumPy. Throws TypeError for a bool, and for objects with a
/// length, such as an array of one element.
double real_value(pybind11::handle object, const ArgumentName& name);

/// A bool, of Python or NumPy; other objects with a truth value are a TypeError.
bool flag_value(pybind11::handle object, const ArgumentName& name);

/// A window of keys: None, a pair of sides, each an int of at least 0 or None, or the left side
/// alone if the mask is causal.
std::optional<KeyWindow> key_window_value(
    pybind11::handle object, bool causal, const ArgumentName& name
);

/// A str, in UTF-8.
std::string text_value(pybind11::handle object, const ArgumentName& name);

}  // namespace cpattn::bindings
