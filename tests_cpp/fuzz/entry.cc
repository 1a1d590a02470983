// SPDX-License-Identifier: Apache-2.0
#include "fuzz/entry.h"

#include "cpattn/base/parallel.h"
#include "fuzz/fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t* data, std::size_t size) {
  cpattn::set_num_threads(1);  // inputs are small, and what they reach must not depend on threads
  cpattn::fuzz::run({data, size});
  return 0;
}
