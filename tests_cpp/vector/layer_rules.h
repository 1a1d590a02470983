// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace cpattn::testing {

/// The rule of the contract that a vector layer breaks, or null. Each is compiled for its
/// instruction set, and may be called where the machine has it.
const char* broken_rule_portable();
const char* broken_rule_avx2();
const char* broken_rule_avx512();
const char* broken_rule_neon();

}  // namespace cpattn::testing
