// SPDX-License-Identifier: Apache-2.0
#pragma once

// Storage types of Q, K, V and out. Distinct structs, so that overloads tell
// the two 16-bit formats apart.
#include <stdint.h>

namespace cpattn::kernels {
namespace {

struct Half {
  uint16_t bits;
};

struct Bfloat16 {
  uint16_t bits;
};

}  // namespace
}  // namespace cpattn::kernels
