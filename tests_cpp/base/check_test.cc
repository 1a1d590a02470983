// SPDX-License-Identifier: Apache-2.0
#include "cpattn/base/check.h"

#include <gtest/gtest.h>

namespace cpattn {
namespace {

TEST(Check, PassesSilently) { EXPECT_NO_THROW(check(true, "never built")); }

TEST(Check, JoinsItsPartsIntoTheMessage) {
  try {
    check(false, "f: x must be > ", 0, ", got ", -3);
    FAIL();
  } catch (const std::invalid_argument& error) {
    EXPECT_STREQ(error.what(), "f: x must be > 0, got -3");
  }
}

TEST(NarrowToInt32, KeepsWhatFitsAndRefusesTheRest) {
  EXPECT_EQ(narrow_to_int32(INT32_MAX, "x"), INT32_MAX);
  EXPECT_EQ(narrow_to_int32(INT32_MIN, "x"), INT32_MIN);
  EXPECT_THROW(narrow_to_int32(int64_t{INT32_MAX} + 1, "x"), std::invalid_argument);
  EXPECT_THROW(narrow_to_int32(int64_t{INT32_MIN} - 1, "x"), std::invalid_argument);
}

}  // namespace
}  // namespace cpattn
