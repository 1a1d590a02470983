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

}  // namespace cpattn
