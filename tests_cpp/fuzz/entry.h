// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

/// What libFuzzer and replay_main.cc call, for each input.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, std::size_t size);
