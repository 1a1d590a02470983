// SPDX-License-Identifier: Apache-2.0
#include "cpattn/kv/page_rows.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <numeric>
#include <stdexcept>
#include <vector>

#include "cpattn/kv/kv_scatter.h"
#include "testing.h"

namespace cpattn {
namespace {

using testing::view;

constexpr int64_t kPageCount = 40, kHeadCount = 3, kSlotsOfPage = 32, kRowDim = 80;
constexpr int64_t kSlotCount = kPageCount * kSlotsOfPage, kRowElements = kHeadCount * kRowDim;

class PageRowsOf : public testing::EveryIsa {};

/// Pages of heads get what a pool gets, codes included; many rows, so that threads share them.
TEST_P(PageRowsOf, AreThoseOfPools) {
  std::vector<float> rows(2 * kSlotCount * kRowElements);
  for (std::size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<float>(i % 9973) / 100 - 50;
  std::vector<int64_t> slots(2 * kSlotCount);
  for (int64_t i = 0; i < 2 * kSlotCount; ++i) slots[i] = i * 7 % kSlotCount;
  slots[5] = -1;
  for (DType dtype : {DType::float8_e4m3fn, DType::float8_e5m2, DType::int8}) {
    const KVBuffer pool("test", 1, kSlotCount, kRowElements, dtype);
    auto pool_slots = slots;
    const KVRows part{
        .name = "k",
        .rows = view(rows, DType::float32, {2 * kSlotCount, kRowElements}),
        .buffer = pool,
        .scale = 0.7,
    };
    write_kv_rows("test", 0, pool_slots, {&part, 1});

    std::vector<uint8_t> pages(kSlotCount * kRowElements);
    auto page_slots = slots;
    const PageRows own{
        .name = "k",
        .pages_name = "k_pages",
        .rows = view(rows, DType::float32, {2 * kSlotCount, kHeadCount, kRowDim}),
        .pages = view(pages, dtype, {kPageCount, kHeadCount, kSlotsOfPage, kRowDim}),
        .scale = 0.7,
    };
    write_page_rows("test", page_slots, {&own, 1});
    for (int64_t slot = 0; slot < kSlotCount; ++slot) {
      for (int64_t i = 0; i < kRowElements; ++i) {
        const int64_t page = slot / kSlotsOfPage, head = i / kRowDim, offset = slot % kSlotsOfPage;
        const int64_t at =
            ((page * kHeadCount + head) * kSlotsOfPage + offset) * kRowDim + i % kRowDim;
        ASSERT_EQ(pages[at], static_cast<uint8_t>(pool.data()[slot * kRowElements + i]));
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Isa, PageRowsOf, ::testing::ValuesIn(supported_isas()), testing::isa_test_name
);

TEST(PageRows, SlotsOutsideOfThePagesAreRefused) {
  std::vector<float> rows(kRowElements), pages(kSlotCount * kRowElements);
  const PageRows part{
      .name = "k",
      .pages_name = "k_pages",
      .rows = view(rows, DType::float32, {1, kHeadCount, kRowDim}),
      .pages = view(pages, DType::float32, {kPageCount, kHeadCount, kSlotsOfPage, kRowDim}),
  };
  for (int64_t slot : {kSlotCount, int64_t{-2}}) {
    std::vector<int64_t> slots = {slot};
    EXPECT_THROW(write_page_rows("test", slots, {&part, 1}), std::invalid_argument);
  }
  std::vector<int64_t> slots = {kSlotCount - 1};
  rows.assign(kRowElements, 1);
  write_page_rows("test", slots, {&part, 1});
  EXPECT_EQ(std::accumulate(pages.begin(), pages.end(), 0.0F), static_cast<float>(kRowElements));
  EXPECT_EQ(pages.back(), 1);
}

}  // namespace
}  // namespace cpattn
