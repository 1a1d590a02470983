// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "cpattn/kv/pool_memory.h"

namespace cpattn {

/// What keeps a range of memory alive, as far as pools own it.
using MemoryOwners = std::vector<std::shared_ptr<PoolMemory>>;

/// The owners of each range [addrs[i], addrs[i] + sizes[i]), for an engine that peers will write
/// to it through. std::invalid_argument that names `function`, range and rule unless all of it is
/// memory that this process can read and write now, so that no write that the engine allows can
/// crash it. Addresses of a device are none of that: without `on_host` only pools are looked for.
/// Ranges of no bytes have no owners and are not looked at. Lists of equal length.
std::vector<MemoryOwners> own_memory(
    const char* function,
    std::span<const uint64_t> addrs,
    std::span<const uint64_t> sizes,
    bool on_host = true
);

}  // namespace cpattn
