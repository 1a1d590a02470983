// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <string_view>

namespace cpattn {

/// Text of the environment as an error may show it: "?" for each byte that is not printable ASCII,
/// because Python takes only UTF-8 messages.
inline std::string printable(std::string_view text) {
  std::string shown(text);
  for (char& byte : shown) {
    if (byte < ' ' || byte > '~') byte = '?';
  }
  return shown;
}

}  // namespace cpattn
