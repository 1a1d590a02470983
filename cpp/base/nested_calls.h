// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace cpattn {

/// While alive, calls of this thread are nested ones, with scratch of their own: a call that is in
/// the middle of its work looks for Ctrl-C, and a signal handler or the garbage collector may make
/// another.
class NestedCalls {
 public:
  NestedCalls();
  ~NestedCalls();
  NestedCalls(const NestedCalls&) = delete;
  NestedCalls& operator=(const NestedCalls&) = delete;
};

/// While alive, this thread works at items that may hold its scratch. At the end of the outermost
/// one scratch far above the usual is freed.
class ScratchUse {
 public:
  ScratchUse();
  ~ScratchUse();
  ScratchUse(const ScratchUse&) = delete;
  ScratchUse& operator=(const ScratchUse&) = delete;
};

}  // namespace cpattn
