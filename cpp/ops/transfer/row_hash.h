// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace cpattn {

// The hash of the digests. Peers compare its values, so it never changes under this name of the
// digest's format. The words are binary digits of pi, a choice without intent.
inline constexpr uint64_t kHashWords[] = {
    0x243f6a8885a308d3, 0x13198a2e03707344, 0xa4093822299f31d0, 0x082efa98ec4e6c89,
    0x452821e638d01377, 0xbe5466cf34e90c6c, 0xc0ac29b7c97c50dd, 0x3f84d5b5b5470917,
};

/// Returns the halves of the product, one over the other.
inline uint64_t fold(uint64_t a, uint64_t b) {
  __extension__ using Wide = unsigned __int128;
  const Wide product = static_cast<Wide>(a) * b;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

inline uint64_t entry_key(int64_t layer_id, uint64_t kind, bool is_draft) {
  const uint64_t name = kind << 1 | static_cast<uint64_t>(is_draft);
  return fold(static_cast<uint64_t>(layer_id) ^ kHashWords[4], name ^ kHashWords[5]);
}

inline uint64_t head_key(uint64_t entry_key, int64_t head) {
  return fold(entry_key ^ kHashWords[6], static_cast<uint64_t>(head) ^ kHashWords[7]);
}

/// Four chains over the stripes of a row, 64 bytes each: four products in flight keep up with
/// reading memory.
class StripeChains {
 public:
  static constexpr std::size_t kBytes = 64;

  void add(const unsigned char* stripe) {
    static_assert(std::endian::native == std::endian::little, "peers agree on the order of bytes");
    uint64_t words[8];
    std::memcpy(words, stripe, kBytes);
    for (int i = 0; i < 4; ++i) {
      chains_[i] = fold(words[2 * i] ^ kHashWords[i], words[2 * i + 1] ^ chains_[i]);
    }
  }
  uint64_t merged() const {
    return fold(chains_[0] ^ kHashWords[2], chains_[1]) ^
           fold(chains_[2] ^ kHashWords[3], chains_[3]);
  }

 private:
  uint64_t chains_[4] = {kHashWords[4], kHashWords[5], kHashWords[6], kHashWords[7]};
};

/// The hash of a row, its last stripe padded with zeros.
inline uint64_t row_hash(
    const unsigned char* bytes, std::size_t num_bytes, uint64_t head_key, int64_t position
) {
  StripeChains chains;
  std::size_t at = 0;
  for (; at + StripeChains::kBytes <= num_bytes; at += StripeChains::kBytes) chains.add(bytes + at);
  if (at < num_bytes) {
    unsigned char rest[StripeChains::kBytes] = {};
    std::memcpy(rest, bytes + at, num_bytes - at);
    chains.add(rest);
  }
  const uint64_t seed = fold(head_key ^ kHashWords[0], static_cast<uint64_t>(position) ^ head_key);
  return fold(fold(chains.merged() ^ seed, kHashWords[1] ^ num_bytes) ^ kHashWords[2], seed);
}

}  // namespace cpattn
