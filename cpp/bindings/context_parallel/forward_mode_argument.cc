// SPDX-License-Identifier: Apache-2.0
#include "bindings/context_parallel/forward_mode_argument.h"

#include "bindings/arguments/int_argument.h"
#include "cpattn/base/check.h"

namespace py = pybind11;

namespace cpattn::bindings {

std::optional<ForwardMode> optional_mode(py::handle mode, const ArgumentName& name) {
  if (mode.is_none()) return std::nullopt;
  const int64_t value = index_value(mode, name);
  check(
      value >= static_cast<int64_t>(ForwardMode::extend) &&
          value <= static_cast<int64_t>(ForwardMode::dllm_extend),
      name, " must be a ForwardMode, got ", value
  );
  return static_cast<ForwardMode>(value);
}

}  // namespace cpattn::bindings
