// SPDX-License-Identifier: Apache-2.0
#include "cpattn/sparse/dsa_metadata.h"

#include <gtest/gtest.h>

#include <vector>

namespace cpattn {
namespace {

using Ints = std::vector<int32_t>;

TEST(DsaMetadata, RaggedExtendWithTables) {
  const std::vector<int64_t> extend_lens = {3, 2}, seq_lens = {5, 3}, pool_indices = {1, 0};
  const Ints slots = {40, 41, 42, 43, 48, -1, 8, 9, 10, 11, 4, 5};  // two rows of six
  const DsaMetadata metadata = build_dsa_metadata({
      .seq_lens = seq_lens,
      .extend_lens = extend_lens,
      .topk = 4,
      .fp8_kv_cache = true,
      .prefill_impl = "flashmla_sparse",
      .page_size = 4,
      .req_to_token = IndexTable{.data = slots.data(), .rows = 2, .columns = 6, .row_stride = 6},
      .req_pool_indices = pool_indices,
  });
  EXPECT_EQ(metadata.seqlens_expanded, (Ints{3, 4, 5, 2, 3}));
  EXPECT_EQ(metadata.ks, (Ints{0, 0, 0, 5, 5}));
  EXPECT_EQ(metadata.ke, (Ints{3, 4, 5, 7, 8}));
  EXPECT_EQ(metadata.topk_indices_offset, metadata.ks);
  EXPECT_EQ(metadata.dsa_cache_seqlens, (Ints{3, 4, 4, 2, 3}));
  EXPECT_EQ(metadata.page_table_1, (Ints{8, 9, 10, 11, 4, 40, 41, 42, 43, 48}));
  EXPECT_EQ(metadata.real_page_table, (Ints{2, 1, 10, 12}));
  EXPECT_EQ(metadata.page_table_1_flattened, (Ints{8, 9, 10, 11, 4, 40, 41, 42}));
}

TEST(DsaMetadata, NoSequences) {
  const DsaMetadata metadata =
      build_dsa_metadata({.forward_mode = ForwardMode::idle, .prefill_impl = "fa3"});
  EXPECT_EQ(metadata.cu_seqlens_k, (Ints{0}));
  EXPECT_TRUE(metadata.ks.empty());
}

TEST(TopkTransformMethodChoice, RaggedInAPlainExtendOnly) {
  const auto choose = [](std::optional<ForwardMode> mode) {
    return get_topk_transform_method(mode, true, "flashmla_sparse");
  };
  EXPECT_EQ(choose(ForwardMode::extend), TopkTransformMethod::ragged);
  EXPECT_EQ(choose(ForwardMode::mixed), TopkTransformMethod::paged);
  EXPECT_EQ(choose(std::nullopt), TopkTransformMethod::paged);
  EXPECT_THROW(get_topk_transform_method({}, true, "flash"), std::invalid_argument);
}

}  // namespace
}  // namespace cpattn
