// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdio>
#include <cstdlib>
#include <optional>
#include <stdexcept>
#include <type_traits>

#include "fuzz/reader.h"

namespace cpattn::fuzz {

/// What a target is: arguments out of the bytes of one input, calls, and checks of what comes back.
/// Nothing may leave it.
void run(Reader in);

[[noreturn]] inline void fail(const char* file, int line, const char* claim) {
  std::fprintf(stderr, "%s:%d: not so: %s\n", file, line, claim);
  std::abort();
}

/// What the call returns, or nothing if it refuses its arguments. Other exceptions are findings.
template <class Call>
auto accepted(Call call) -> std::optional<std::invoke_result_t<Call>> {
  try {
    return call();
  } catch (const std::invalid_argument&) {
    return std::nullopt;
  }
}

/// The same of a function that promises another exception besides.
template <class Error, class Call>
auto accepted_but_for(Call call) -> decltype(accepted(call)) {
  try {
    return accepted(call);
  } catch (const Error&) {
    return std::nullopt;
  }
}

}  // namespace cpattn::fuzz

/// Ends the process unless the claim holds, in every build.
#define FUZZ_CHECK(claim) ((claim) ? void(0) : ::cpattn::fuzz::fail(__FILE__, __LINE__, #claim))
