// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "cpattn/base/key_window.h"

namespace cpattn::fuzz {

/// Values out of the bytes of a fuzzer, in their order; zeros when these are used up. LLVM's
/// FuzzedDataProvider is part of clang only, and GCC replays the same inputs.
class Reader {
 public:
  Reader(const uint8_t* data, std::size_t size) : bytes_(data, size) {}

  uint64_t bits(int num_bytes) {
    uint64_t value = 0;
    for (int i = 0; i < num_bytes && !bytes_.empty(); ++i) {
      value |= uint64_t{bytes_.front()} << (8 * i);
      bytes_ = bytes_.subspan(1);
    }
    return value;
  }

  /// In [low, high], of as few bytes as that needs. Bytes of zero give `low`.
  int64_t between(int64_t low, int64_t high) {
    const uint64_t width = static_cast<uint64_t>(high) - static_cast<uint64_t>(low);
    const int num_bytes = width <= UINT8_MAX ? 1 : width <= UINT16_MAX ? 2 : 8;
    const uint64_t value = bits(num_bytes);
    const uint64_t offset = width == UINT64_MAX ? value : value % (width + 1);
    return static_cast<int64_t>(static_cast<uint64_t>(low) + offset);
  }

  bool flag() { return (bits(1) & 1) != 0; }
  /// True once in `chances`, never when the bytes are used up.
  bool rarely(int chances = 32) { return static_cast<int>(bits(1)) > 255 - 256 / chances; }

  template <class T, std::size_t kSize>
  T one_of(const T (&values)[kSize]) {
    return values[between(0, kSize - 1)];
  }

  /// Any integer, often one beside a border.
  int64_t any() {
    constexpr int64_t kBorders[] = {
        0,
        INT16_MAX,
        int64_t{1} << 20,
        INT32_MAX,
        INT32_MIN,
        int64_t{UINT32_MAX},
        int64_t{1} << 40,
        int64_t{1} << 48,
        INT64_MAX,
        INT64_MIN
    };
    if (flag()) return static_cast<int64_t>(bits(8));
    const auto border = static_cast<uint64_t>(one_of(kBorders));
    return static_cast<int64_t>(border + bits(1) - 2);  // modulo 2^64
  }

  /// Mostly the value: one that a caller means. Else its neighbour, or any.
  int64_t mostly(int64_t value, int chances = 64) {
    if (!rarely(chances)) return value;
    if (flag()) return any();
    return static_cast<int64_t>(static_cast<uint64_t>(value) + (flag() ? 1 : UINT64_MAX));
  }

  /// A window of few keys, mostly; either side may have no limit.
  KeyWindow window() {
    const auto side = [this] {
      return rarely(4) ? std::nullopt : std::optional(mostly(between(0, 6), 8));
    };
    const std::optional<int64_t> left = side();
    return {.left = left, .right = side()};
  }

  std::vector<int64_t> list(int64_t size, auto next) {
    std::vector<int64_t> values;
    values.reserve(size);
    for (int64_t i = 0; i < size; ++i) values.push_back(next());
    return values;
  }

  /// A size of a list, mostly the one that fits.
  int64_t size_near(int64_t size) {
    if (!rarely()) return size;
    return between(0, size + 1);
  }

 private:
  std::span<const uint8_t> bytes_;
};

}  // namespace cpattn::fuzz
