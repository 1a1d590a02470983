// SPDX-License-Identifier: Apache-2.0
#include "kernels/vector/avx512-inl.h"
// The vector layer comes first.
#include "vector/layer_rules-inl.h"
// Compiled like the kernels of this instruction set.
#include "vector/layer_rules.h"

namespace cpattn::testing {

const char* broken_rule_avx512() { return kernels::broken_rule(); }

}  // namespace cpattn::testing
