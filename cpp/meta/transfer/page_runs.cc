// SPDX-License-Identifier: Apache-2.0
#include "meta/transfer/page_runs.h"

#include <algorithm>

#include "cpattn/base/check.h"
#include "meta/transfer/kv_runs.h"

namespace cpattn {
namespace {

int64_t place(const PageShape& shape, int64_t slot) {
  return slot / shape.page_size * static_cast<int64_t>(shape.page_stride) +
         slot % shape.page_size * static_cast<int64_t>(shape.token_stride);
}

int64_t left_of_page(const PageShape& shape, int64_t slot) {
  return shape.page_size - slot % shape.page_size;
}

/// Steps along heads or tokens, and their bytes on both sides.
struct Axis {
  int64_t count = 1;
  uint64_t src = 0;
  uint64_t dst = 0;
};

/// Tokens of one page on both sides: blocks along two axes, the last axis innermost.
struct Piece {
  TransferRun first;  // block, in bytes
  Axis outer;
  Axis inner;
};

void append_blocks(std::vector<TransferRun>& runs, const Piece& piece) {
  const auto at = [](int64_t begin, int64_t steps, uint64_t stride) {
    return begin + steps * static_cast<int64_t>(stride);
  };
  for (int64_t i = 0; i < piece.outer.count; ++i) {
    TransferRun block = piece.first;
    block.src = at(block.src, i, piece.outer.src);
    block.dst = at(block.dst, i, piece.outer.dst);
    for (int64_t j = 0; j < piece.inner.count; ++j) {
      append_run(
          runs, {at(block.src, j, piece.inner.src), at(block.dst, j, piece.inner.dst), block.count}
      );
    }
  }
}

/// The piece of `count` tokens from these slots on; its blocks ascend in the destination.
Piece piece_of(const PairShape& shape, int64_t src, int64_t dst, int64_t count) {
  const bool joined =
      shape.src.token_stride == shape.bytes && shape.dst.token_stride == shape.bytes;
  const Axis heads = {shape.num_heads, shape.src.head_stride, shape.dst.head_stride};
  const Axis tokens = {joined ? 1 : count, shape.src.token_stride, shape.dst.token_stride};
  const bool heads_first = heads.dst > tokens.dst;
  return {
      .first =
          {place(shape.src, src), place(shape.dst, dst),
           static_cast<int64_t>(shape.bytes) * (joined ? count : 1)},
      .outer = heads_first ? heads : tokens,
      .inner = heads_first ? tokens : heads,
  };
}

}  // namespace

std::vector<TransferRun> byte_runs(const PairShape& shape, std::span<const TransferRun> slots) {
  std::vector<TransferRun> runs;
  runs.reserve(slots.size());
  int64_t num_blocks = 0;
  for (TransferRun run : slots) {
    while (run.count > 0) {
      const int64_t count =
          std::min({run.count, left_of_page(shape.src, run.src), left_of_page(shape.dst, run.dst)});
      const Piece piece = piece_of(shape, run.src, run.dst, count);
      num_blocks += piece.outer.count * piece.inner.count;
      check(
          num_blocks <= kMaxSteps, "plan_kv_transfer: pages and heads must cut a buffer into at ",
          "most ", kMaxSteps, " pieces, got more"
      );
      append_blocks(runs, piece);
      run = {run.src + count, run.dst + count, run.count - count};
    }
  }
  if (!sort_by_destination(runs)) return runs;
  std::vector<TransferRun> joined;
  joined.reserve(runs.size());
  for (const TransferRun& run : runs) append_run(joined, run);
  return joined;
}

}  // namespace cpattn
