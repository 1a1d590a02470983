// SPDX-License-Identifier: Apache-2.0
#pragma once

// Division of scratch into buffers.
#include <stdint.h>

namespace cpattn::kernels {
namespace {

/// Carves aligned buffers out of the caller's scratch; from null it only counts.
struct Carver {
  char* base;
  int64_t used = 0;

  template <class T>
  void take(T*& buffer, int64_t elements) {
    buffer = base == nullptr ? nullptr : reinterpret_cast<T*>(base + used);
    used += (elements * static_cast<int64_t>(sizeof(T)) + 63) / 64 * 64;
  }
};

}  // namespace
}  // namespace cpattn::kernels
