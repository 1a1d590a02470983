// SPDX-License-Identifier: Apache-2.0
#include "bindings/gil.h"

#include <pthread.h>
#include <unistd.h>

namespace py = pybind11;

namespace cpattn::bindings {
namespace {

unsigned long main_thread = 0;

bool on_main_thread() { return PyThread_get_thread_ident() == main_thread; }

bool interpreter_is_ending() {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsFinalizing() != 0;
#else
  return _Py_IsFinalizing() != 0;
#endif
}

/// Runs `take`, which takes the GIL. If the interpreter has begun to end on another thread, neither
/// returns.
template <class Take>
void take_gil(Take take) {
  try {
    take();
  } catch (...) {  // not an error: pthread_exit, on its way up the stack
    for (;;) pause();
  }
}

/// True when a signal handler raised in Python (Ctrl-C); the Python error is then set on this
/// thread. Takes the GIL for the check.
bool python_signal_pending() {
  if (interpreter_is_ending()) return false;
  PyGILState_STATE state{};
  take_gil([&] { state = PyGILState_Ensure(); });
  const bool pending = PyErr_CheckSignals() != 0;
  PyGILState_Release(state);
  return pending;
}

}  // namespace

GilRelease::~GilRelease() {
  take_gil([this] { PyEval_RestoreThread(state_); });
}

Computation::Computation() : interrupts_(on_main_thread() ? &python_signal_pending : nullptr) {}

void remember_main_thread() {
  main_thread =
      py::module_::import("threading").attr("main_thread")().attr("ident").cast<unsigned long>();
  // The main thread of a forked child is the one that forked.
  pthread_atfork(nullptr, nullptr, [] { main_thread = PyThread_get_thread_ident(); });
}

}  // namespace cpattn::bindings
