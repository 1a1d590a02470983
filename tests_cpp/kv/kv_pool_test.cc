// SPDX-License-Identifier: Apache-2.0
#include "cpattn/kv/kv_pool.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <new>
#include <stdexcept>
#include <vector>

#include "cpattn/kv/kv_scatter.h"
#include "testing.h"

namespace cpattn {
namespace {

using testing::view;

TEST(KVBuffer, IsZeroAlignedAndLazy) {
  const KVBuffer buffer("test", 8, 1 << 20, 1 << 12, DType::bfloat16);
  EXPECT_EQ(buffer.row_bytes(), 1 << 13);
  EXPECT_EQ(buffer.layer_bytes(), int64_t{1} << 33);
  EXPECT_EQ(buffer.num_bytes(), int64_t{1} << 36);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(buffer.data()) % 4096, 0U);
  char& last = buffer.data()[buffer.num_bytes() - 1];
  EXPECT_EQ(last, 0);
  last = 7;
  EXPECT_EQ(buffer.data()[buffer.num_bytes() - 1], 7);
}

TEST(KVBuffer, RefusesWhatCannotBe) {
  const auto make = [](int64_t layers, int64_t slots, int64_t elements) {
    const KVBuffer buffer("test", layers, slots, elements, DType::float32);
  };
  EXPECT_THROW(make(0, 1, 1), std::invalid_argument);
  EXPECT_THROW(make(1, -1, 1), std::invalid_argument);
  EXPECT_THROW(make(1, 1, 0), std::invalid_argument);
  EXPECT_THROW(make(int64_t{1} << 30, int64_t{1} << 30, 2), std::invalid_argument);  // 2^63
  EXPECT_THROW(make(int64_t{1} << 30, int64_t{1} << 29, 2), std::bad_alloc);
}

class KvScatter : public testing::EveryIsa {};

/// Past the size from which writes are streamed, with every slot given twice.
TEST_P(KvScatter, LargeWritesKeepTheLastRow) {
  constexpr int64_t kSlots = 9000, kElements = 512;
  const KVBuffer buffer("test", 2, kSlots, kElements, DType::float32);
  std::vector<float> rows(2 * kSlots * kElements);
  std::vector<int64_t> slots(2 * kSlots);
  for (int64_t i = 0; i < 2 * kSlots; ++i) {
    slots[i] = i * 7 % kSlots;
    std::fill_n(rows.begin() + i * kElements, kElements, static_cast<float>(i));
  }
  slots[kSlots + 5] = -1;
  const int64_t once = 5 * 7;  // its second row is the skipped one
  const KVRows part{
      .name = "k", .rows = view(rows, DType::float32, {2 * kSlots, kElements}), .buffer = buffer
  };
  write_kv_rows("test", 1, slots, {&part, 1});
  const auto* written = reinterpret_cast<const float*>(buffer.data());
  for (int64_t i = kSlots; i < 2 * kSlots; ++i) {
    const int64_t slot = i * 7 % kSlots;
    const auto wanted = static_cast<float>(slot == once ? i - kSlots : i);
    for (int64_t j = 0; j < kElements; ++j) {
      ASSERT_EQ(written[(kSlots + slot) * kElements + j], wanted) << slot;
      ASSERT_EQ(written[slot * kElements + j], 0) << slot;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Isa, KvScatter, ::testing::ValuesIn(supported_isas()), testing::isa_test_name
);

}  // namespace
}  // namespace cpattn
