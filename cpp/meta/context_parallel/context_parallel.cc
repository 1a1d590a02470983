// SPDX-License-Identifier: Apache-2.0
#include "cpattn/context_parallel/context_parallel.h"

#include <algorithm>
#include <numeric>

#include "cpattn/base/check.h"
#include "meta/context_parallel/block_split.h"
#include "meta/context_parallel/weighted_cuts.h"

namespace cpattn {
namespace {

using Ints = ContextParallelMetadata::Ints;
using MutableInts = std::span<int32_t>;

/// Cuts arrays off one allocation, one after the other.
class Arena {
 public:
  explicit Arena(int64_t size)
      : storage_(std::make_shared_for_overwrite<int32_t[]>(size)), free_(storage_.get(), size) {}

  MutableInts take(int64_t size) {
    const MutableInts array = free_.first(size);
    free_ = free_.subspan(size);
    return array;
  }
  const std::shared_ptr<int32_t[]>& storage() const { return storage_; }

 private:
  std::shared_ptr<int32_t[]> storage_;
  MutableInts free_;
};

/// Writes 0 and the running sums of `lens` to `out` and returns them; null if they exceed int32.
Ints running_sums(Ints lens, MutableInts out) {
  int64_t total = 0;
  out[0] = 0;
  for (std::size_t i = 0; i < lens.size(); ++i) {
    total += lens[i];
    out[i + 1] = static_cast<int32_t>(total);
  }
  return total <= INT32_MAX ? Ints(out) : Ints();
}

/// Checks a batch, then lays out the common arrays and those of each rank.
class Builder {
 public:
  Builder(const char* function, const CpBatch& batch);
  std::vector<ContextParallelMetadata> build(int32_t first_rank, int32_t num_ranks);

 private:
  void fill_lens(MutableInts extend, MutableInts prefix);
  void fill_interleaved_rows(MutableInts rows) const;
  template <class Split>
  void fill_rows(const Split& split, MutableInts rows) const;
  template <class Split>
  ContextParallelMetadata rank_share(const Split& split, Arena& arena, int32_t rank) const;

  const char* function_;
  const CpBatch& batch_;
  CpBatch::Lens extend_lens_;
  int32_t halves_ = 0;              // blocks per rank and sequence: prev and next, prev, or none
  ContextParallelMetadata common_;  // fields that do not depend on the rank
};

Builder::Builder(const char* function, const CpBatch& batch) : function_(function), batch_(batch) {
  check(
      batch.cp_size >= 1 && batch.cp_size <= kMaxCpSize, function, ": cp_size must be in [1, ",
      kMaxCpSize, "], got ", batch.cp_size
  );
  if (batch.extend_lens) {
    extend_lens_ = *batch.extend_lens;
  } else {
    check(batch.compat, function, ": extend_lens must be given unless compat is true");
    if (batch.seq_lens && !batch.seq_lens->empty()) {
      extend_lens_ = *batch.seq_lens;
    } else {
      check(
          batch.num_tokens.has_value(), function,
          ": one of extend_lens, seq_lens and num_tokens must be given"
      );
      extend_lens_ = {&*batch.num_tokens, 1};
    }
  }
  const auto size = static_cast<int64_t>(extend_lens_.size());
  check(size >= 1, function, ": extend_lens must hold at least one sequence, got none");
  check(
      size * 2 * batch.cp_size <= INT32_MAX, function,
      ": the number of blocks, 2 * cp_size * len(extend_lens), must fit into int32, got ",
      size * 2 * batch.cp_size
  );
  common_.weights = checked_weights(function, batch);
  common_.strategy = batch.strategy;
  common_.kv_len_convention = batch.kv_len_convention;
  common_.bs = static_cast<int32_t>(size);
  common_.cp_size = static_cast<int32_t>(batch.cp_size);
  halves_ = batch.strategy == CpStrategy::zigzag ? 2 : batch.strategy == CpStrategy::contiguous;
}

void Builder::fill_lens(MutableInts extend, MutableInts prefix) {
  std::optional<CpBatch::Lens> seq_lens = batch_.seq_lens;
  if (seq_lens && seq_lens->size() != extend_lens_.size()) {
    check(
        batch_.compat, function_, ": seq_lens must have as many elements as extend_lens, got ",
        seq_lens->size(), " and ", extend_lens_.size()
    );
    seq_lens.reset();
  }
  const int32_t bs = common_.bs;
  int64_t total = 0;
  for (int32_t s = 0; s < bs; ++s) {
    const int64_t length = extend_lens_[s];
    const int64_t whole = seq_lens ? (*seq_lens)[s] : length;
    check(
        length >= 0 && length <= INT32_MAX, function_,
        ": extend_lens must be >= 0 and fit into int32, got ", length, " at index ", s
    );
    check(
        batch_.compat || whole >= length, function_, ": seq_lens must be >= extend_lens, got ",
        whole, " below ", length, " at index ", s
    );
    total += length;
    check(
        std::max(whole, total) <= INT32_MAX, function_,
        ": prefix + extend and the sum of extend_lens must fit into int32, got ",
        std::max(whole, total), " at index ", s
    );
    extend[s] = static_cast<int32_t>(length);
    prefix[s] = whole > length ? static_cast<int32_t>(whole - length) : 0;
  }
  const int64_t num_tokens = batch_.num_tokens.value_or(total);
  check(
      num_tokens >= total, function_, ": num_tokens must be >= the sum of extend_lens, ", total,
      ", got ", num_tokens
  );
  check(
      num_tokens <= INT32_MAX && prefix.back() + extend.back() + (num_tokens - total) <= INT32_MAX,
      function_, ": num_tokens, and the last sequence padded to it, must fit into int32, got ",
      num_tokens
  );
  extend.back() += static_cast<int32_t>(num_tokens - total);
  common_.total_seq_lens = static_cast<int32_t>(num_tokens);
}

void Builder::fill_interleaved_rows(MutableInts rows) const {
  const int32_t total = common_.total_seq_lens;
  const int32_t cp_size = common_.cp_size;
  for (int32_t rank = 0; rank < cp_size; ++rank) {
    rows[rank] = total / cp_size + (rank < total % cp_size ? 1 : 0);
  }
}

template <class Split>
void Builder::fill_rows(const Split& split, MutableInts rows) const {
  for (int32_t rank = 0; rank < common_.cp_size; ++rank) {
    int32_t sum = 0;
    for (int32_t half = 0; half < split.halves; ++half) {
      const int32_t block = block_of(split, rank, half);
      for (int32_t s = 0; s < common_.bs; ++s) {
        sum += split.size(s, block);
      }
    }
    rows[rank] = sum;
  }
}

template <class Split>
ContextParallelMetadata Builder::rank_share(const Split& split, Arena& arena, int32_t rank) const {
  ContextParallelMetadata share = common_;
  share.cp_rank = rank;
  const int32_t bs = common_.bs;
  const int64_t num_lens = int64_t{halves_} * bs;
  const MutableInts blocks = arena.take(num_lens);
  const MutableInts q_lens = arena.take(num_lens);
  const MutableInts kv_lens = arena.take(num_lens);
  const bool baked = batch_.kv_len_convention == KvLenConvention::baked;
  for (int32_t half = 0; half < halves_; ++half) {
    const int32_t block = block_of(split, rank, half);
    for (int32_t s = 0, i = half * bs; s < bs; ++s, ++i) {
      blocks[i] = s * split.num_blocks + block;
      q_lens[i] = split.size(s, block);
      kv_lens[i] = split.before(s, block + 1) + (baked ? common_.prefix_lens[s] : 0);
    }
  }
  const MutableInts cu_q = arena.take(num_lens + 1);
  const MutableInts cu_kv = arena.take(num_lens + 1);
  const MutableInts cu_q_next = arena.take(num_lens - bs + 1);
  const MutableInts cu_kv_next = arena.take(num_lens - bs + 1);
  share.zigzag_index = blocks;
  share.actual_seq_q_prev = q_lens.first(bs);
  share.actual_seq_q_next = q_lens.subspan(bs);
  share.kv_len_prev = kv_lens.first(bs);
  share.kv_len_next = kv_lens.subspan(bs);
  share.cu_seqlens_q_prev = running_sums(share.actual_seq_q_prev, cu_q.first(bs + 1));
  share.cu_seqlens_q_next = running_sums(share.actual_seq_q_next, cu_q_next);
  share.cu_seqlens_kv_prev = running_sums(share.kv_len_prev, cu_kv.first(bs + 1));
  share.cu_seqlens_kv_next = running_sums(share.kv_len_next, cu_kv_next);
  share.total_q_prev_tokens = cu_q[bs];
  share.total_q_next_tokens = cu_q_next.back();
  share.max_seqlen_q_prev = std::ranges::max(share.actual_seq_q_prev);
  if (halves_ == 2) {
    share.max_seqlen_q_next = std::ranges::max(share.actual_seq_q_next);
    share.max_seqlen_q_combined = std::max(share.max_seqlen_q_prev, share.max_seqlen_q_next);
    share.actual_seq_q_combined = q_lens;
    share.kv_len_combined = kv_lens;
    share.cu_seqlens_q_combined = running_sums(q_lens, cu_q);
    share.cu_seqlens_kv_combined = running_sums(kv_lens, cu_kv);
  }
  return share;
}

std::vector<ContextParallelMetadata> Builder::build(int32_t first_rank, int32_t num_ranks) {
  const int32_t bs = common_.bs;
  const int32_t cp_size = common_.cp_size;
  const int64_t num_lens = int64_t{halves_} * bs;
  const int64_t common_size = 2 * int64_t{bs} + 3 * int64_t{cp_size};
  const int64_t rank_size =
      halves_ == 0 ? 0 : 3 * num_lens + 2 * (num_lens + 1) + 2 * (num_lens - bs + 1);
  const int64_t num_cuts = common_.weights == nullptr ? 0 : bs * (int64_t{halves_} * cp_size + 1);
  Arena arena(common_size + num_cuts + num_ranks * rank_size);

  common_.storage = arena.storage();
  const MutableInts extend = arena.take(bs);
  const MutableInts prefix = arena.take(bs);
  const MutableInts rows = arena.take(cp_size);
  const MutableInts longest = arena.take(cp_size);
  const MutableInts physical = arena.take(cp_size);
  fill_lens(extend, prefix);
  common_.extend_lens = extend;
  common_.prefix_lens = prefix;
  common_.per_rank_actual_token = rows;
  common_.max_rank_len = longest;
  common_.physical_rows = physical;
  if (common_.weights != nullptr) {
    const MutableInts cuts = arena.take(num_cuts);
    fill_weighted_cuts(function_, common_, cuts);
    common_.cuts = cuts;
  }

  std::vector<ContextParallelMetadata> shares;
  shares.reserve(num_ranks);
  if (batch_.strategy == CpStrategy::interleave) {
    fill_interleaved_rows(rows);
    shares.assign(num_ranks, common_);
    for (int32_t i = 0; i < num_ranks; ++i) shares[i].cp_rank = first_rank + i;
  } else {
    with_split(common_, [&](const auto& split) {
      fill_rows(split, rows);
      for (int32_t i = 0; i < num_ranks; ++i) {
        shares.push_back(rank_share(split, arena, first_rank + i));
      }
    });
  }
  std::ranges::fill(longest, std::ranges::max(rows));
  const int64_t align = int64_t{std::max(halves_, 1)} * cp_size;
  // May exceed int32 for one rank of nearly 2^31 tokens; pad_to_physical checks.
  std::ranges::fill(physical, static_cast<int32_t>((longest[0] + align - 1) / align * align));
  return shares;
}

}  // namespace

ContextParallelMetadata build_cp_metadata(const CpBatch& batch, int64_t cp_rank) {
  constexpr auto kFunction = "build_cp_metadata";
  Builder builder(kFunction, batch);
  check(
      cp_rank >= 0 && cp_rank < batch.cp_size, kFunction, ": cp_rank must be in [0, ",
      batch.cp_size, "), got ", cp_rank
  );
  return std::move(builder.build(static_cast<int32_t>(cp_rank), 1).front());
}

std::vector<ContextParallelMetadata> build_cp_metadata_all_ranks(const CpBatch& batch) {
  return Builder("build_cp_metadata_all_ranks", batch)
      .build(0, static_cast<int32_t>(batch.cp_size));
}

ContextParallelMetadata pad_to_physical(const ContextParallelMetadata& metadata) {
  if (metadata.is_physical) return metadata;
  check(
      metadata.physical_rows[0] >= metadata.max_rank_len[0],
      "pad_to_physical: the padded rows of a rank must fit into int32, got ",
      metadata.max_rank_len[0], " before padding"
  );
  ContextParallelMetadata physical = metadata;
  physical.is_physical = true;
  physical.per_rank_logical_token = metadata.per_rank_actual_token;
  physical.per_rank_actual_token = metadata.physical_rows;
  physical.max_rank_len = metadata.physical_rows;
  return physical;
}

bool ContextParallelMetadata::operator==(const ContextParallelMetadata& other) const {
  // All other fields follow from these.
  const bool same_weights = weights == nullptr || other.weights == nullptr
                                ? weights == other.weights
                                : *weights == *other.weights;
  return same_weights && strategy == other.strategy &&
         kv_len_convention == other.kv_len_convention && is_physical == other.is_physical &&
         cp_rank == other.cp_rank && cp_size == other.cp_size &&
         std::ranges::equal(extend_lens, other.extend_lens) &&
         std::ranges::equal(prefix_lens, other.prefix_lens);
}

}  // namespace cpattn
