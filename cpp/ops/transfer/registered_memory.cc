// SPDX-License-Identifier: Apache-2.0
#include "cpattn/transfer/registered_memory.h"

#include <cstddef>
#include <optional>

#include "cpattn/base/address_space.h"
#include "cpattn/base/check.h"

namespace cpattn {
namespace {

/// Whether pools own every byte of the range.
bool covered(const MemoryOwners& owners, uint64_t addr, uint64_t size) {
  const uint64_t last = addr + (size - 1);
  uint64_t next = addr;  // the first byte not known to be owned
  for (const auto& memory : owners) {
    if (memory->addr() > next) return false;
    const uint64_t end = memory->addr() + memory->num_bytes();
    if (end > last) return true;
    next = end;
  }
  return false;
}

}  // namespace

std::vector<MemoryOwners> own_memory(
    const char* function,
    std::span<const uint64_t> addrs,
    std::span<const uint64_t> sizes,
    bool on_host
) {
  std::vector<MemoryOwners> owners(addrs.size());
  std::optional<AddressSpace> space;
  for (std::size_t i = 0; i < addrs.size(); ++i) {
    const uint64_t addr = addrs[i], size = sizes[i];
    if (size == 0) continue;
    check(
        addr <= UINT64_MAX - (size - 1), function, ": addrs + sizes must not pass 2^64, got ", addr,
        " + ", size, " at index ", i
    );
    owners[i] = PoolMemory::find(addr, size);
    if (!on_host || covered(owners[i], addr, size)) continue;
    if (!space) space = AddressSpace::now(function);
    const std::optional<uint64_t> gap = space->find_gap(addr, size);
    check(
        !gap, function, ": addrs and sizes must be memory that this process can read and write, ",
        "got ", size, " bytes at ", addr, " at index ", i, ", of which that at ", gap.value_or(0),
        " is not"
    );
  }
  return owners;
}

}  // namespace cpattn
