// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace cpattn {

/// Whether tokens come before heads in a page of keys or values (NHD), or heads before tokens.
enum class KVAxisOrder { nhd, hnd };

}  // namespace cpattn
