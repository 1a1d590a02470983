// SPDX-License-Identifier: Apache-2.0
// Prints the instruction set that cpattn would choose on this machine: cmake/InstructionSets.cmake.
#include <iostream>

#include "cpattn/base/isa.h"

int main() { std::cout << cpattn::isa_name(cpattn::supported_isas().back()); }
