// SPDX-License-Identifier: Apache-2.0
// Every vector layer keeps the rules of kernels/vector/contract-inl.h, and so does one of plain
// arrays that was written from them.
#include <gtest/gtest.h>

#include "testing.h"
#include "vector/array_layer-inl.h"
#include "vector/layer_rules.h"
// The rules need a layer: here that of arrays.
#include "vector/layer_rules-inl.h"

namespace cpattn {
namespace {

TEST(VectorLayer, OfArraysKeepsTheRules) { EXPECT_STREQ(kernels::broken_rule(), nullptr); }

class VectorLayerOf : public testing::EveryIsa {};

TEST_P(VectorLayerOf, TheMachineKeepsTheRules) {
  switch (GetParam()) {
    case Isa::portable:
      EXPECT_STREQ(testing::broken_rule_portable(), nullptr);
      break;
#if defined(CPATTN_HAVE_AVX2)
    case Isa::avx2:
      EXPECT_STREQ(testing::broken_rule_avx2(), nullptr);
      break;
#endif
#if defined(CPATTN_HAVE_AVX512)
    case Isa::avx512:
      EXPECT_STREQ(testing::broken_rule_avx512(), nullptr);
      break;
#endif
#if defined(CPATTN_HAVE_NEON)
    case Isa::neon:
      EXPECT_STREQ(testing::broken_rule_neon(), nullptr);
      break;
#endif
    default:  // Its layer is that of another instruction set.
      break;
  }
}

INSTANTIATE_TEST_SUITE_P(
    Isa, VectorLayerOf, ::testing::ValuesIn(supported_isas()), testing::isa_test_name
);

}  // namespace
}  // namespace cpattn
