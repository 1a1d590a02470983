// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace cpattn {

/// Copies lengths[i] bytes from address src_addrs[i] to dst_addrs[i] for every i, within this
/// process, on at most `num_threads` threads (0: default_num_threads()). The order is unspecified:
/// a destination must overlap no source and no other destination. The caller vouches for the
/// addresses. An interrupted call has copied any part of the bytes. Throws std::invalid_argument,
/// before anything is copied, for lists of unequal length and lengths that do not add up to less
/// than 2^63.
void copy_blocks(
    std::span<const uint64_t> src_addrs,
    std::span<const uint64_t> dst_addrs,
    std::span<const uint64_t> lengths,
    int num_threads = 0
);

/// Returns the blocks, ascending, in which some byte differs at the two addresses. Writes nothing
/// and is otherwise like copy_blocks().
std::vector<int64_t> differing_blocks(
    std::span<const uint64_t> src_addrs,
    std::span<const uint64_t> dst_addrs,
    std::span<const uint64_t> lengths,
    int num_threads = 0
);

}  // namespace cpattn
