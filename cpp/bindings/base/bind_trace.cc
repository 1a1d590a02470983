// SPDX-License-Identifier: Apache-2.0
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <cstddef>
#include <memory>
#include <utility>

#include "bindings/arguments/arguments.h"
#include "bindings/module.h"
#include "cpattn/base/check.h"
#include "cpattn/base/trace.h"

namespace py = pybind11;
using namespace py::literals;

namespace cpattn::bindings {
namespace {

/// A TraceSpan as a context manager.
struct PythonSpan {
  TraceScope scope;
  std::unique_ptr<TraceSpan> span;
};

/// The fields of a TraceEvent; PYBIND11_NUMPY_DTYPE would register them for all modules.
py::dtype event_dtype() {
  py::list names;
  py::list formats;
  py::list offsets;
  const auto add = [&](const char* name, const py::dtype& format, std::size_t offset) {
    names.append(name);
    formats.append(format);
    offsets.append(offset);
  };
  add("begin", py::dtype::of<int64_t>(), offsetof(TraceEvent, begin));
  add("end", py::dtype::of<int64_t>(), offsetof(TraceEvent, end));
  add("flops", py::dtype::of<int64_t>(), offsetof(TraceEvent, flops));
  add("scope", py::dtype::of<uint8_t>(), offsetof(TraceEvent, scope));
  add("dtype", py::dtype::of<uint8_t>(), offsetof(TraceEvent, dtype));
  add("thread", py::dtype::of<uint16_t>(), offsetof(TraceEvent, thread));
  add("function", py::dtype::of<uint16_t>(), offsetof(TraceEvent, function));
  return {names, formats, offsets, sizeof(TraceEvent)};
}

/// TraceScope as an IntEnum; py::native_enum would register it for all modules.
py::object scope_enum(const py::module_& module) {
  py::list members;
  for (const auto& [name, scope] : {
           std::pair{"pack", TraceScope::pack},
           std::pair{"qk", TraceScope::qk},
           std::pair{"softmax", TraceScope::softmax},
           std::pair{"pv", TraceScope::pv},
           std::pair{"write", TraceScope::write},
           std::pair{"merge", TraceScope::merge},
           std::pair{"gather", TraceScope::gather},
           std::pair{"plan", TraceScope::plan},
           std::pair{"wait", TraceScope::wait},
           std::pair{"item", TraceScope::item},
           std::pair{"call", TraceScope::call},
       }) {
    members.append(py::make_tuple(name, static_cast<int>(scope)));
  }
  py::object type = py::module_::import("enum").attr("IntEnum")(
      "TraceScope", members, "module"_a = module.attr("__name__")
  );
  type.attr("__doc__") = "What a thread is doing.";
  return type;
}

py::tuple python_trace(const Trace& trace) {
  py::list threads;
  for (const TraceThread& thread : trace.threads) {
    threads.append(py::make_tuple(thread.name, thread.id, thread.dropped));
  }
  const py::array events(event_dtype(), trace.events.size(), trace.events.data());
  return py::make_tuple(trace.nanoseconds, events, threads, trace.functions);
}

}  // namespace

void register_trace(py::module_& module) {
  const py::object scopes = scope_enum(module);
  module.attr("TraceScope") = scopes;
  module.def(
      "start_trace",
      [](py::handle max_events) {
        start_trace(Arguments("profile").integer(max_events, "max_events"));
      },
      "max_events"_a
  );
  module.def("stop_trace", [] { return python_trace(stop_trace()); });
  module.def(
      "dtype_name",
      [](uint8_t code) {
        check(code <= static_cast<uint8_t>(kLastDType), "dtype_name: no dtype ", int{code});
        return dtype_name(static_cast<DType>(code));
      },
      "code"_a
  );
  py::class_<PythonSpan> span(module, "TraceSpan", py::module_local(), py::is_final());
  const auto make_span = [type = scopes.ptr()](const py::object& scope) {
    if (!py::isinstance(scope, type)) throw py::type_error("TraceSpan: scope must be a TraceScope");
    return PythonSpan{static_cast<TraceScope>(scope.cast<int>()), nullptr};
  };
  span.def(py::init(make_span), "scope"_a);
  span.def("__enter__", [](PythonSpan& self) {
    self.span = std::make_unique<TraceSpan>(self.scope);
  });
  span.def(
      "__exit__",
      [](PythonSpan& self, const py::object&, const py::object&, const py::object&) {
        self.span.reset();
      },
      "kind"_a, "error"_a, "traceback"_a
  );
}

}  // namespace cpattn::bindings
