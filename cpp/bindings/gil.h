// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

#include "cpattn/base/parallel.h"

namespace cpattn::bindings {

#ifdef Py_GIL_DISABLED
inline constexpr bool kHasGil = false;
#else
inline constexpr bool kHasGil = true;
#endif

/// Releases the GIL while it lives.
///
/// A daemon thread may want the GIL back when the interpreter has begun to end. CPython then ends
/// the thread (before 3.14) by unwinding its stack, which no destructor allows: the process would
/// abort. Here such a thread waits for the end of the process instead, as in CPython 3.14.
class GilRelease {
 public:
  GilRelease() : state_(PyEval_SaveThread()) {}
  ~GilRelease();
  GilRelease(const GilRelease&) = delete;
  GilRelease& operator=(const GilRelease&) = delete;

 private:
  PyThreadState* state_;
};

/// Releases the GIL for a computation, which Ctrl-C ends if it is on Python's main thread.
/// Construct it after the arguments have been converted.
class Computation {
 public:
  Computation();

 private:
  GilRelease release_;
  InterruptScope interrupts_;
};

/// Remembers which thread is Python's main one, which alone runs signal handlers.
void remember_main_thread();

}  // namespace cpattn::bindings
