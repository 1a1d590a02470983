// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string_view>

#include "cpattn/base/check.h"

namespace cpattn {

/// Whether tokens come before heads in a page of keys or values (NHD), or heads before tokens.
enum class KVAxisOrder { nhd, hnd };

/// The order that kv_layout names, "NHD" or "HND". Throws std::invalid_argument, which names
/// `function`, for another.
inline KVAxisOrder parse_kv_layout(const char* function, std::string_view kv_layout) {
  check(
      kv_layout == "NHD" || kv_layout == "HND", function,
      ": kv_layout must be 'NHD' or 'HND', got '", kv_layout, "'"
  );
  return kv_layout == "NHD" ? KVAxisOrder::nhd : KVAxisOrder::hnd;
}

}  // namespace cpattn
