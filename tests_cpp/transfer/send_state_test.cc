// SPDX-License-Identifier: Apache-2.0
#include "cpattn/transfer/send_state.h"

#include <gtest/gtest.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "testing.h"

namespace cpattn {
namespace {

using testing::message_of;
using Ints = std::vector<int64_t>;
using Words = std::vector<uint64_t>;

/// A component of state: item lengths of both sides, and how they pair.
struct Component {
  Words src_lens, dst_lens;
  Ints src_ids, dst_ids;
  std::optional<int64_t> start, end;
  int64_t pp_size = 1;
  bool is_flat = true;
  bool knows_dst_lens = true;
  bool allow_dst_elision = true;
  int64_t num_missing_lens = 0;

  Ints entries(bool compat = false) const {
    const Words src(src_lens.size(), 4096), dst(dst_lens.size(), 8192);
    const Words known(dst_lens.begin(), dst_lens.end() - num_missing_lens);
    SendBuffers buffers{.src_addrs = src, .src_item_lens = src_lens, .dst_addrs = dst};
    if (knows_dst_lens) buffers.dst_item_lens = known;
    buffers.src_layer_ids = src_ids;
    buffers.dst_layer_ids = dst_ids;
    const StateEntries pairing{
        .prefill_start_layer = start,
        .prefill_end_layer = end,
        .pp_size = pp_size,
        .is_flat = is_flat,
        .has_dst_item_lens = knows_dst_lens,
        .allow_dst_elision = allow_dst_elision
    };
    return state_entries(buffers, pairing, compat);
  }
  std::string message(bool compat = false) const {
    return message_of([&] { entries(compat); });
  }
};

TEST(StateEntries, EqualCountsPairWhateverTheStage) {
  const Component same{.src_lens = {8, 0, 8}, .dst_lens = {8, 8, 0}, .start = 5};
  EXPECT_EQ(same.entries(), (Ints{0, kElided, kElided}));
  EXPECT_EQ(same.entries(true), (Ints{0, kElided, kElided}));
}

TEST(StateEntries, AStageTakesItsLayersOfTheModel) {
  const Component stage{.src_lens = {8, 8}, .dst_lens = {9, 8, 0, 9}, .start = 1, .end = 3};
  for (const bool compat : {false, true}) {
    EXPECT_EQ(stage.entries(compat), (Ints{1, kElided})) << "lengths are cut like pointers";
  }
  const Component last{.src_lens = {8, 8}, .dst_lens = {9, 9, 9, 8, 8}, .start = 3, .end = 4};
  EXPECT_EQ(last.entries(), (Ints{3, 4})) << "the draft is behind the model";
}

TEST(StateEntries, ByIds) {
  const Component ids{
      .src_lens = {8, 8, 4, 4},
      .dst_lens = {8, 8, 9, 4, 4, 9},
      .src_ids = {3, 7, 3, 7},
      .dst_ids = {3, 7, 11, 3, 7, 11},
      .pp_size = 2
  };
  EXPECT_EQ(ids.entries(), (Ints{0, 1, 3, 4}));
  Component one_side{.src_lens = {8}, .dst_lens = {8, 9}, .src_ids = {3}};
  EXPECT_EQ(one_side.entries(), (Ints{0})) << "by position";
  one_side.pp_size = 2;
  EXPECT_THROW(one_side.entries(), std::runtime_error);
}

TEST(StateEntries, OnlyTheSourceMayElide) {
  Component elided{.src_lens = {0, 8}, .dst_lens = {8, 0}};
  EXPECT_EQ(elided.entries(), (Ints{kElided, kElided}));
  elided.allow_dst_elision = false;
  EXPECT_EQ(
      elided.message(),
      "plan_send_state: item lengths must be equal, got 8 of source entry 1 and 0 of destination "
      "entry 1"
  );
  elided.knows_dst_lens = false;
  EXPECT_EQ(elided.entries(), (Ints{kElided, 1}));
}

TEST(StateEntries, Refusals) {
  const std::string name = "plan_send_state: ";
  EXPECT_EQ(
      (Component{.src_lens = {8}, .dst_lens = {8, 8}, .is_flat = false}.message()),
      name +
          "state buffers must be as many on both sides, got 1 of the source and 2 of the "
          "destination"
  );
  EXPECT_EQ(
      (Component{.src_lens = {8}, .dst_lens = {8, 8}}.message()),
      name +
          "kv_args must have prefill_start_layer where state buffers are not as many on both "
          "sides, got 1 of the source and 2 of the destination"
  );
  EXPECT_EQ(
      (Component{.src_lens = {8}, .dst_lens = {8, 8}, .start = 2}.message()),
      name + "destination must have the state buffers [2, 3) of the source's layers, got 2"
  );
  EXPECT_EQ(
      (Component{.src_lens = {8}, .dst_lens = {8, 8}, .start = -1}.message()),
      name + "prefill_start_layer must be >= 0, got -1"
  );
  EXPECT_EQ(
      (Component{.src_lens = {8, 8}, .dst_lens = {8, 8, 8}, .start = 0, .end = 1}.message()),
      name +
          "destination must have the 1 draft buffers of the source behind its 1 layers, got 3 "
          "buffers"
  );
  EXPECT_EQ(
      (Component{.src_lens = {8}, .dst_lens = {4}}.message()),
      name + "item lengths must be equal, got 8 of source entry 0 and 4 of destination entry 0"
  );
  EXPECT_EQ(
      (Component{.src_lens = {8}, .dst_lens = {8}, .num_missing_lens = 1}.message()),
      name + "destination must have an item length for each of 1 entries, got 0"
  );
  EXPECT_EQ(
      (Component{.src_lens = {8}, .dst_lens = {8}, .num_missing_lens = 1}.message(true)),
      name + "destination must have an item length for its entry 0, got 0"
  );
  EXPECT_EQ(
      (Component{.src_lens = {8}, .dst_lens = {8}, .pp_size = 0}.message()),
      name + "pp_size must be >= 1, got 0"
  );
  const Component beyond{.src_lens = {8, 8}, .dst_lens = {8, 8, 8}, .start = 2};
  EXPECT_THROW(beyond.entries(true), std::out_of_range) << "[2:4] of three";
}

TEST(PlanSendState, NothingOfElidedEntries) {
  const Words src = {1000, 0, 3000}, src_lens = {8, 0, 8}, dst = {5000, 6000, 7000};
  const Ints src_pages = {1, 2}, dst_pages = {4, 5};
  const TransferPlan plan = plan_send_state(
      {.src_addrs = src, .src_item_lens = src_lens, .dst_addrs = dst}, {src_pages, dst_pages}, {},
      false
  );
  ASSERT_EQ(plan.num_blocks(), 2U);
  EXPECT_EQ(plan.src_addrs()[1], 3008U);
  EXPECT_EQ(plan.dst_addrs()[1], 7032U);
  EXPECT_EQ(plan.lengths()[1], 16U);
}

}  // namespace
}  // namespace cpattn
