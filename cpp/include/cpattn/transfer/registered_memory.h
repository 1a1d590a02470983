// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "cpattn/kv/pool_memory.h"

namespace cpattn {

/// Owners that keep a range of memory alive, as far as pools own it.
using MemoryOwners = std::vector<std::shared_ptr<PoolMemory>>;

/// Returns the owners of each range [addrs[i], addrs[i] + sizes[i]), for an engine through which
/// peers will write to it. Throws std::invalid_argument, which names `function`, range and rule,
/// unless this process can read and write all of the range now, so that no write that the engine
/// allows can crash it. Without `on_host`, for addresses of a device, it only looks for pools.
/// Ranges of no bytes have no owners and are not checked. The lists have equal length.
std::vector<MemoryOwners> own_memory(
    const char* function,
    std::span<const uint64_t> addrs,
    std::span<const uint64_t> sizes,
    bool on_host = true
);

}  // namespace cpattn
