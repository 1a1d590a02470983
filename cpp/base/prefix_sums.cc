// SPDX-License-Identifier: Apache-2.0
#include "cpattn/base/prefix_sums.h"

#include "cpattn/base/check.h"

namespace cpattn {

void check_prefix_sums(
    const char* function, const char* name, std::span<const int64_t> sums, const PrefixSumRule& rule
) {
  check(
      !rule.leading_zero || (!sums.empty() && sums[0] == 0), function, ": ", name,
      " must begin with 0, got ", sums.empty() ? "nothing" : concat(sums[0])
  );
  int64_t before = 0;
  for (std::size_t i = 0; i < sums.size(); ++i) {
    check(
        sums[i] >= before, function, ": ", name, " must be prefix sums, which never decrease, got ",
        sums[i], " after ", before, " at index ", i
    );
    check(
        rule.reaches_total || sums[i] <= rule.total, function, ": ", name, " must be at most ",
        rule.total_name, ", ", rule.total, ", got ", sums[i], " at index ", i
    );
    before = sums[i];
  }
  check(
      !rule.reaches_total || before == rule.total, function, ": ", name, " must end at ",
      rule.total_name, ", ", rule.total, ", got ", before
  );
}

}  // namespace cpattn
