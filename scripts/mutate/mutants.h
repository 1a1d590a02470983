// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <stdint.h>

/// Shared with the tool, and with every process of a test: the number of the mutant that is
/// active, then a byte for each mutant that is 1 once control has come by.
struct CpattnMutants {
  int32_t active;
  uint8_t reached[1 << 16];
};

extern "C++" CpattnMutants& cpattn_mutants();

/// Whether the mutant is active. It notes that control came by.
inline bool cpattn_mutant(int32_t number) {
  CpattnMutants& mutants = cpattn_mutants();
  if (!mutants.reached[number]) mutants.reached[number] = 1;
  return mutants.active == number;
}
