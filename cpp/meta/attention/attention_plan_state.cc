// SPDX-License-Identifier: Apache-2.0
#include "cpattn/attention/attention_plan_state.h"

#include <algorithm>
#include <utility>

#include "cpattn/base/check.h"
#include "cpattn/base/page_size.h"

namespace cpattn {
namespace {

constexpr char kName[] = "AttentionPlan";

/// The pages of all sequences, in CSR form.
PageTable pages_of(const AttentionPlanState& state) {
  check_page_size(kName, state.page_size);
  std::vector<int64_t> indptr = {0};
  std::vector<int64_t> last_page_len;
  for (const int64_t kv_len : state.kv_lens) {
    const int64_t pages = kv_len == 0 ? 0 : (kv_len - 1) / state.page_size + 1;
    indptr.push_back(indptr.back() + pages);
    last_page_len.push_back(kv_len - std::max<int64_t>(pages - 1, 0) * state.page_size);
  }
  check(
      indptr.back() == std::ssize(state.page_ids), kName, ": page_ids must be the ", indptr.back(),
      " of kv_lens, got ", state.page_ids.size()
  );
  std::vector<int64_t> kv_lens;
  return page_table_from_csr(
      kName, indptr, state.page_ids, last_page_len, state.page_size, state.num_pages, kv_lens
  );
}

/// Gives the bits the layout of pack_mask: the places of each segment's rows.
MaskBits mask_of(const std::vector<uint8_t>& bits, const std::vector<AttentionSegment>& segments) {
  MaskBits mask;
  const int64_t size = std::ssize(bits);
  int64_t bytes = 0;
  for (const AttentionSegment& segment : segments) {
    const int64_t row_bytes = (segment.kv_len + 31) / 32 * 4;
    mask.offsets.push_back(bytes);
    mask.row_bytes.push_back(row_bytes);
    bytes = std::min(bytes + segment.q_len * row_bytes, size + 1);  // a sum that cannot overflow
  }
  check(bytes == size, kName, ": mask_bits must be those of q_lens and kv_lens, got ", size);
  mask.bits = bits;
  return mask;
}

}  // namespace

AttentionPlanState state_of(const AttentionPlan& plan) {
  const AttentionBatch& batch = plan.batch;
  AttentionPlanState state{
      .shape = batch.shape,
      .page_ids = {batch.pages.page_ids.begin(), batch.pages.page_ids.end()},
      .page_size = batch.page_size,
      .num_pages = batch.num_pages,
      .has_mask = !batch.mask.empty(),
      .mask_bits = batch.mask.bits,
      .key_ranges = {batch.key_ranges.begin(), batch.key_ranges.end()},
      .batch_invariant = batch.batch_invariant,
      .precise = batch.precise,
      .num_threads = plan.num_threads,
  };
  for (const AttentionSegment& segment : batch.segments) {
    state.q_lens.push_back(segment.q_len);
    state.kv_lens.push_back(segment.kv_len);
    state.first_positions.push_back(segment.first_position);
    state.left.push_back(segment.left);
    state.right.push_back(segment.right);
  }
  return state;
}

AttentionPlan plan_of(const AttentionPlanState& state) {
  AttentionBatch batch{
      .shape = state.shape,
      .page_size = state.page_size,
      .num_pages = state.num_pages,
      .segments = sequence_segments(kName, state.q_lens, state.kv_lens),
      .batch_invariant = state.batch_invariant,
      .precise = state.precise,
  };
  for (const AttentionSegment& segment : batch.segments) batch.num_rows += segment.q_len;
  batch.pages = pages_of(state);
  for (const auto* of_each : {&state.first_positions, &state.left, &state.right}) {
    check(
        of_each->size() == batch.segments.size(), kName,
        ": first_positions, left and right must be those of ", batch.segments.size(),
        " sequences, got ", of_each->size()
    );
  }
  set_first_positions(kName, state.first_positions, batch.segments);
  for (std::size_t s = 0; s < batch.segments.size(); ++s) {
    for (const int64_t side : {state.left[s], state.right[s]}) {
      check(
          side >= 0 && side <= kUnboundedKeys, kName, ": left and right must be in [0, ",
          kUnboundedKeys, "], got ", side
      );
    }
    batch.segments[s].left = state.left[s];
    batch.segments[s].right = state.right[s];
  }
  check(state.has_mask || state.mask_bits.empty(), kName, ": mask_bits must be those of a mask");
  if (!state.key_ranges.empty()) set_key_ranges(kName, state.key_ranges, batch);
  if (state.has_mask) batch.mask = mask_of(state.mask_bits, batch.segments);
  return plan_attention(kName, std::move(batch), state.num_threads);
}

}  // namespace cpattn
