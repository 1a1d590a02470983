// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <sstream>
#include <stdexcept>
#include <string>

namespace cpattn {

/// Returns the parts as text, one after the other.
template <class... Parts>
std::string concat(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  return text.str();
}

/// Throws std::invalid_argument (ValueError in Python) unless `ok`. The parts make up the message
/// and are joined only on failure. They name the function and the argument, the rule, and the
/// offending value with its position, e.g.
///   check(n >= 0, "build_cp_metadata: extend_lens must be >= 0, got ", n, " at index ", i);
template <class... Parts>
void check(bool ok, const Parts&... parts) {
  if (!ok) [[unlikely]]
    throw std::invalid_argument(concat(parts...));
}

/// check() for one function: require(ok, parts...) is check(ok, "name: ", parts...).
class CheckFor {
 public:
  explicit constexpr CheckFor(const char* function) : function_(function) {}

  template <class... Parts>
  void operator()(bool ok, const Parts&... parts) const {
    check(ok, function_, ": ", parts...);
  }

 private:
  const char* function_;
};

/// Returns `value` as int32. Throws std::invalid_argument, which names `what`, if it does not fit.
inline int32_t narrow_to_int32(int64_t value, const char* what) {
  check(value >= INT32_MIN && value <= INT32_MAX, what, " must fit into int32, got ", value);
  return static_cast<int32_t>(value);
}

}  // namespace cpattn
