// SPDX-License-Identifier: Apache-2.0
#include <string_view>

#include "c/call.h"
#include "cpattn/base/isa.h"
#include "cpattn/base/parallel.h"

// Users compile with the header's version and install the project's.
static_assert(std::string_view(CPATTN_VERSION) == CPATTN_PROJECT_VERSION);

using cpattn::c::Call;
using cpattn::c::guarded;

const char* cpattn_version() { return CPATTN_VERSION; }

cpattn_status cpattn_set_num_threads(int32_t num_threads) {
  return guarded([&] { cpattn::set_num_threads(num_threads); });
}

cpattn_status cpattn_get_num_threads(int32_t* num_threads) {
  return guarded([&] {
    Call("get_num_threads").object(num_threads, "num_threads") = cpattn::default_num_threads();
  });
}

cpattn_status cpattn_active_isa(const char** name) {
  return guarded([&] {
    // The names are literals, which end with a zero.
    Call("active_isa").object(name, "name") = cpattn::isa_name(cpattn::active_isa()).data();
  });
}
