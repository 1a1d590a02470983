// SPDX-License-Identifier: Apache-2.0
#include <pybind11/native_enum.h>
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <memory>

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

py::tuple python_trace(const Trace& trace) {
  py::list threads;
  for (const TraceThread& thread : trace.threads) {
    threads.append(py::make_tuple(thread.name, thread.id, thread.dropped));
  }
  py::array_t<TraceEvent> events(trace.events.size(), trace.events.data());
  return py::make_tuple(trace.nanoseconds, events, threads, trace.functions);
}

}  // namespace

void register_trace(py::module_& module) {
  PYBIND11_NUMPY_DTYPE(TraceEvent, begin, end, flops, scope, dtype, thread, function);
  py::native_enum<TraceScope>(module, "TraceScope", "enum.IntEnum", "What a thread is doing.")
      .value("pack", TraceScope::pack)
      .value("qk", TraceScope::qk)
      .value("softmax", TraceScope::softmax)
      .value("pv", TraceScope::pv)
      .value("write", TraceScope::write)
      .value("merge", TraceScope::merge)
      .value("gather", TraceScope::gather)
      .value("plan", TraceScope::plan)
      .value("wait", TraceScope::wait)
      .value("item", TraceScope::item)
      .value("call", TraceScope::call)
      .finalize();
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
  py::class_<PythonSpan> span(module, "TraceSpan", py::is_final());
  span.def(py::init([](TraceScope scope) { return PythonSpan{scope, nullptr}; }), "scope"_a);
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
