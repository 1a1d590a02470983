// SPDX-License-Identifier: Apache-2.0
#include "cpattn/transfer/kv_pages.h"

#include "cpattn/base/check.h"

namespace cpattn {
namespace {

/// a - b modulo 2^64: indices are not checked here, and at the ends of int64 wrap as NumPy's do.
int64_t difference(int64_t a, int64_t b) {
  return static_cast<int64_t>(static_cast<uint64_t>(a) - static_cast<uint64_t>(b));
}

int64_t step(std::span<const int64_t> indices, std::size_t i) {
  return difference(indices[i], indices[i - 1]);
}

}  // namespace

int64_t kv_to_page_num(int64_t num_tokens, int64_t page_size) {
  check(num_tokens >= 0, "kv_to_page_num: num_tokens must be >= 0, got ", num_tokens);
  check(page_size >= 1, "kv_to_page_num: page_size must be >= 1, got ", page_size);
  return num_tokens / page_size + (num_tokens % page_size != 0);
}

std::vector<int32_t> kv_to_page_indices(std::span<const int64_t> kv_indices, int64_t page_size) {
  check(page_size >= 1, "kv_to_page_indices: page_size must be >= 1, got ", page_size);
  const auto stride = static_cast<std::size_t>(page_size);
  std::vector<int32_t> pages;
  pages.reserve(kv_indices.size() / stride + 1);
  for (std::size_t i = 0; i < kv_indices.size(); i += stride) {
    const int64_t slot = kv_indices[i];
    check(slot >= 0, "kv_to_page_indices: kv_indices must be >= 0, got ", slot, " at index ", i);
    pages.push_back(narrow_to_int32(slot / page_size, "kv_to_page_indices: pages"));
  }
  return pages;
}

std::vector<TransferRun> group_runs(
    std::span<const int64_t> src_indices, std::span<const int64_t> dst_indices
) {
  if (src_indices.empty() || dst_indices.empty()) return {};
  check(
      src_indices.size() == dst_indices.size(),
      "group_concurrent_contiguous requires equal-length src/dst index arrays, got ",
      src_indices.size(), " and ", dst_indices.size()
  );
  std::vector<TransferRun> runs(src_indices.size());
  TransferRun* run = runs.data();
  *run = {src_indices[0], dst_indices[0], 1};
  // No branch, because contiguous pages of a used cache cannot be predicted: every i writes its run
  // again.
  std::size_t first = 0;
  for (std::size_t i = 1; i < src_indices.size(); ++i) {
    const bool splits = ((step(src_indices, i) ^ 1) | (step(dst_indices, i) ^ 1)) != 0;
    run += splits;
    first = splits ? i : first;
    const auto offset = static_cast<int64_t>(i - first);
    *run = {difference(src_indices[i], offset), difference(dst_indices[i], offset), offset + 1};
  }
  runs.resize(run - runs.data() + 1);
  return runs;
}

}  // namespace cpattn
