// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace cpattn {

/// While alive, calls of this thread are nested, with their own scratch: while a call polls for
/// Ctrl-C, a signal handler or the garbage collector may make another call.
class NestedCalls {
 public:
  NestedCalls();
  ~NestedCalls();
  NestedCalls(const NestedCalls&) = delete;
  NestedCalls& operator=(const NestedCalls&) = delete;
};

/// While alive, this thread runs items that may hold its scratch. The outermost scope frees
/// unusually large scratch at its end.
class ScratchUse {
 public:
  ScratchUse();
  ~ScratchUse();
  ScratchUse(const ScratchUse&) = delete;
  ScratchUse& operator=(const ScratchUse&) = delete;
};

}  // namespace cpattn
