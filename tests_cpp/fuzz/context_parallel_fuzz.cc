// SPDX-License-Identifier: Apache-2.0
// Context-parallel metadata of one rank and of all, their token-wise views, and the gates.
#include "cpattn/context_parallel/context_parallel.h"

#include <algorithm>
#include <numeric>
#include <string>
#include <vector>

#include "fuzz/fuzz.h"

namespace cpattn::fuzz {
namespace {

using Ints = std::vector<int64_t>;
using Metadata = ContextParallelMetadata;

constexpr int64_t kMaxRanks = 40;    // that all are built
constexpr int64_t kMaxTokens = 600;  // that are looked at one by one

struct Input {
  std::optional<Ints> extend_lens, seq_lens;
  std::optional<ForwardMode> mode;
  CpBatch batch;
};

Input read_input(Reader& in) {
  Input input;
  CpBatch& batch = input.batch;
  batch.strategy = static_cast<CpStrategy>(in.between(0, 2));
  batch.kv_len_convention = static_cast<KvLenConvention>(in.between(0, 1));
  batch.compat = in.flag();
  batch.cp_size = in.mostly(in.between(1, 9));
  const int64_t largest = in.one_of({int64_t{40}, int64_t{200}, int64_t{INT32_MAX} / 4});
  const int64_t size = in.between(0, 5);
  const auto length = [&] { return in.mostly(in.between(0, largest)); };
  if (!in.rarely()) input.extend_lens = in.list(size, length);
  if (in.flag()) {
    int64_t s = 0;
    input.seq_lens = in.list(in.size_near(size), [&] {
      const int64_t prefix = in.between(0, largest);
      const bool known = input.extend_lens && s < std::ssize(*input.extend_lens);
      const int64_t extend = known ? (*input.extend_lens)[s++] : 0;
      return in.mostly(static_cast<int64_t>(static_cast<uint64_t>(extend) + prefix));
    });
  }
  if (in.rarely(4)) {
    uint64_t total = 0;
    for (const int64_t n : input.extend_lens.value_or(Ints())) total += static_cast<uint64_t>(n);
    batch.num_tokens = in.mostly(static_cast<int64_t>(total + in.bits(1)));
  }
  if (in.flag()) input.mode = static_cast<ForwardMode>(in.between(1, 9));
  if (input.extend_lens) batch.extend_lens = *input.extend_lens;
  if (input.seq_lens) batch.seq_lens = *input.seq_lens;
  return input;
}

void check_gates(const Input& input) {
  const CpBatch& batch = input.batch;
  const Ints lens = input.extend_lens.value_or(Ints());
  const auto can = accepted([&] {
    return can_apply_cp(lens, batch.cp_size, batch.strategy, batch.num_tokens, input.mode);
  });
  const ForwardMode mode = input.mode.value_or(ForwardMode::extend);
  const auto can_interleave = accepted([&] {
    return can_dsa_prefill_cp_interleave(lens, batch.cp_size, batch.strategy, mode);
  });
  FUZZ_CHECK(can.has_value() == can_interleave.has_value());
  if (!can) return;
  FUZZ_CHECK(!*can_interleave || batch.strategy == CpStrategy::interleave);
  if (batch.strategy == CpStrategy::interleave && input.mode) FUZZ_CHECK(*can == *can_interleave);
  if (!*can) return;
  FUZZ_CHECK(batch.cp_size > 1);
  const int64_t least = batch.strategy == CpStrategy::zigzag ? 2 * batch.cp_size : batch.cp_size;
  if (batch.strategy == CpStrategy::interleave) {
    FUZZ_CHECK(std::accumulate(lens.begin(), lens.end(), int64_t{0}) >= least);
  } else {
    FUZZ_CHECK(std::ranges::all_of(lens, [least](int64_t n) { return n >= least; }));
  }
}

bool same(Metadata::Ints a, Metadata::Ints b) {
  return (a.data() == nullptr) == (b.data() == nullptr) && std::ranges::equal(a, b);
}

/// Every field, where == asks for those that the others follow from.
void check_equal(const Metadata& a, const Metadata& b) {
  FUZZ_CHECK(a == b);
  FUZZ_CHECK(a.bs == b.bs && a.total_seq_lens == b.total_seq_lens);
  FUZZ_CHECK(a.total_q_prev_tokens == b.total_q_prev_tokens);
  FUZZ_CHECK(a.total_q_next_tokens == b.total_q_next_tokens);
  FUZZ_CHECK(a.max_seqlen_q_prev == b.max_seqlen_q_prev);
  FUZZ_CHECK(a.max_seqlen_q_next == b.max_seqlen_q_next);
  FUZZ_CHECK(a.max_seqlen_q_combined == b.max_seqlen_q_combined);
  for (const auto field :
       {&Metadata::extend_lens, &Metadata::prefix_lens, &Metadata::per_rank_actual_token,
        &Metadata::max_rank_len, &Metadata::per_rank_logical_token, &Metadata::zigzag_index,
        &Metadata::kv_len_prev, &Metadata::kv_len_next, &Metadata::kv_len_combined,
        &Metadata::actual_seq_q_prev, &Metadata::actual_seq_q_next,
        &Metadata::actual_seq_q_combined, &Metadata::cu_seqlens_q_prev,
        &Metadata::cu_seqlens_q_next, &Metadata::cu_seqlens_q_combined,
        &Metadata::cu_seqlens_kv_prev, &Metadata::cu_seqlens_kv_next,
        &Metadata::cu_seqlens_kv_combined, &Metadata::physical_rows}) {
    FUZZ_CHECK(same(a.*field, b.*field));
  }
}

void check_sums(Metadata::Ints lens, Metadata::Ints sums) {
  if (sums.data() == nullptr) {
    FUZZ_CHECK(std::accumulate(lens.begin(), lens.end(), int64_t{0}) > INT32_MAX);
    return;
  }
  FUZZ_CHECK(sums.size() == lens.size() + 1 && sums[0] == 0);
  for (std::size_t i = 0; i < lens.size(); ++i) FUZZ_CHECK(sums[i + 1] == sums[i] + lens[i]);
}

void check_rank(const Metadata& metadata, const Input& input) {
  const auto bs = static_cast<std::size_t>(metadata.bs);
  FUZZ_CHECK(metadata.extend_lens.size() == bs && metadata.prefix_lens.size() == bs);
  int64_t total = 0;
  for (std::size_t s = 0; s < bs; ++s) {
    FUZZ_CHECK(metadata.extend_lens[s] >= 0 && metadata.prefix_lens[s] >= 0);
    FUZZ_CHECK(int64_t{metadata.extend_lens[s]} + metadata.prefix_lens[s] <= INT32_MAX);
    total += metadata.extend_lens[s];
  }
  FUZZ_CHECK(total == metadata.total_seq_lens);
  FUZZ_CHECK(!input.batch.num_tokens || *input.batch.num_tokens == total);
  const Metadata::Ints rows = metadata.per_rank_actual_token;
  FUZZ_CHECK(std::accumulate(rows.begin(), rows.end(), int64_t{0}) == total);
  FUZZ_CHECK(metadata.max_rank_len[0] == std::ranges::max(rows));
  if (metadata.strategy == CpStrategy::interleave) return;
  check_sums(metadata.actual_seq_q_prev, metadata.cu_seqlens_q_prev);
  check_sums(metadata.actual_seq_q_next, metadata.cu_seqlens_q_next);
  check_sums(metadata.kv_len_prev, metadata.cu_seqlens_kv_prev);
  check_sums(metadata.kv_len_next, metadata.cu_seqlens_kv_next);
  if (metadata.strategy == CpStrategy::zigzag) {
    check_sums(metadata.actual_seq_q_combined, metadata.cu_seqlens_q_combined);
    check_sums(metadata.kv_len_combined, metadata.cu_seqlens_kv_combined);
  }
  FUZZ_CHECK(
      int64_t{metadata.total_q_prev_tokens} + metadata.total_q_next_tokens ==
      metadata.num_local_rows()
  );
}

/// Every token belongs to one rank, which knows its sequence and how much it sees.
void check_tokens(const std::vector<Metadata>& ranks) {
  const Metadata& first = ranks[0];
  std::vector<int32_t> sequence_of, position_of, rank_order;
  for (int32_t s = 0; s < first.bs; ++s) {
    for (int32_t i = 0; i < first.extend_lens[s]; ++i) {
      sequence_of.push_back(s);
      position_of.push_back(first.prefix_lens[s] + i);
    }
  }
  for (const Metadata& rank : ranks) {
    const std::vector<int32_t> tokens = local_q_indices(rank);
    const std::vector<int32_t> requests = query_request_indices(rank);
    const std::vector<int32_t> lengths = query_cache_lengths(rank);
    const auto rows = static_cast<std::size_t>(rank.num_local_rows());
    FUZZ_CHECK(tokens.size() == rows && requests.size() == rows && lengths.size() == rows);
    for (std::size_t i = 0; i < rows; ++i) {
      FUZZ_CHECK(tokens[i] >= 0 && tokens[i] < first.total_seq_lens);
      FUZZ_CHECK(requests[i] == sequence_of[tokens[i]]);
      FUZZ_CHECK(lengths[i] == position_of[tokens[i]] + 1);
    }
    rank_order.insert(rank_order.end(), tokens.begin(), tokens.end());
    if (rank.strategy == CpStrategy::interleave) {
      const std::vector<int32_t> per_request = rows_per_request(rank);
      std::vector<int32_t> counted(rank.bs, 0);
      for (const int32_t request : requests) ++counted[request];
      FUZZ_CHECK(counted == per_request);
    }
  }
  const std::vector<int32_t> gathered = gathered_row_indices(first);
  FUZZ_CHECK(rank_order.size() == gathered.size());
  for (std::size_t token = 0; token < gathered.size(); ++token) {
    FUZZ_CHECK(rank_order.at(gathered[token]) == static_cast<int32_t>(token));
  }
}

void check_blocks(const Metadata& metadata) {
  const auto sizes = accepted([&] { return split_list(metadata); });
  FUZZ_CHECK(sizes.has_value() == (metadata.strategy != CpStrategy::interleave));
  if (!sizes) return;
  const std::vector<int32_t> by_rank = reverse_split_len(metadata);
  const std::vector<int32_t> order = cp_reverse_index(metadata);
  FUZZ_CHECK(sizes->size() == by_rank.size() && sizes->size() == order.size());
  FUZZ_CHECK(std::accumulate(sizes->begin(), sizes->end(), int64_t{0}) == metadata.total_seq_lens);
  std::vector<bool> seen(order.size(), false);
  for (std::size_t block = 0; block < order.size(); ++block) {
    FUZZ_CHECK(by_rank.at(order[block]) == (*sizes)[block] && !seen[order[block]]);
    seen[order[block]] = true;
  }
}

void check_padding(const Metadata& metadata) {
  const auto physical = accepted([&] { return pad_to_physical(metadata); });
  if (!physical) return;
  const int64_t align =
      metadata.cp_size * (metadata.strategy == CpStrategy::zigzag ? int64_t{2} : int64_t{1});
  const int64_t rows = physical->per_rank_actual_token[0];
  FUZZ_CHECK(physical->is_physical && rows % align == 0);
  FUZZ_CHECK(rows >= metadata.max_rank_len[0] && rows - metadata.max_rank_len[0] < align);
  FUZZ_CHECK(physical->num_local_rows() == metadata.num_local_rows());
  check_equal(*physical, pad_to_physical(*physical));
}

void check_names(Reader& in) {
  std::string name(in.between(0, 20), '\0');
  for (char& sign : name) sign = static_cast<char>(in.bits(1));
  if (const auto strategy = accepted([&] { return parse_cp_strategy(name, "fuzz"); })) {
    FUZZ_CHECK(parse_cp_strategy(cp_strategy_name(*strategy), "fuzz") == *strategy);
  }
  if (const auto known = accepted([&] { return parse_kv_len_convention(name, "fuzz"); })) {
    FUZZ_CHECK(kv_len_convention_name(*known) == name);
  }
}

}  // namespace

void run(Reader in) {
  const Input input = read_input(in);
  check_gates(input);
  const CpBatch& batch = input.batch;
  const int64_t rank = in.mostly(in.between(0, std::clamp<int64_t>(batch.cp_size, 1, 256) - 1));
  if (in.rarely()) check_names(in);
  const auto one = accepted([&] { return build_cp_metadata(batch, rank); });
  if (one) {
    FUZZ_CHECK(one->cp_rank == rank && one->cp_size == batch.cp_size);
    check_rank(*one, input);
    check_padding(*one);
  }
  if (batch.cp_size > kMaxRanks && batch.cp_size <= kMaxCpSize) return;
  const auto all = accepted([&] { return build_cp_metadata_all_ranks(batch); });
  const bool rank_exists = rank >= 0 && rank < batch.cp_size;
  FUZZ_CHECK(one.has_value() == (all.has_value() && rank_exists));
  if (!all) return;
  FUZZ_CHECK(std::ssize(*all) == batch.cp_size);
  for (const Metadata& metadata : *all) check_rank(metadata, input);
  if (one) check_equal(*one, (*all)[rank]);
  check_blocks((*all)[0]);
  if ((*all)[0].total_seq_lens <= kMaxTokens) check_tokens(*all);
}

}  // namespace cpattn::fuzz
