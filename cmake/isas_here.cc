// SPDX-License-Identifier: Apache-2.0
// Prints the instruction sets of this machine as a list of CMake, the fastest last:
// cmake/InstructionSets.cmake.
#include <iostream>

#include "cpattn/base/isa.h"

int main() {
  for (const cpattn::Isa isa : cpattn::supported_isas()) {
    if (isa != cpattn::Isa::portable) std::cout << ';';
    std::cout << cpattn::isa_name(isa);
  }
}
