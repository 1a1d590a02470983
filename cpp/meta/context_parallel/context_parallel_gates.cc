// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <numeric>
#include <utility>

#include "cpattn/base/check.h"
#include "cpattn/context_parallel/context_parallel.h"

namespace cpattn {
namespace {

using Lens = std::span<const int64_t>;

/// Every name of a strategy in serving engines, after its own name.
constexpr std::array<std::pair<std::string_view, CpStrategy>, 6> kStrategyNames = {{
    {"zigzag", CpStrategy::zigzag},
    {"interleave", CpStrategy::interleave},
    {"contiguous", CpStrategy::contiguous},
    {"in-seq-split", CpStrategy::zigzag},
    {"head_tail", CpStrategy::zigzag},
    {"round-robin-split", CpStrategy::interleave},
}};

void check_gate(const char* function, Lens extend_lens, int64_t cp_size) {
  check(
      cp_size >= 1 && cp_size <= kMaxCpSize, function, ": cp_size must be in [1, ", kMaxCpSize,
      "], got ", cp_size
  );
  for (std::size_t s = 0; s < extend_lens.size(); ++s) {
    check(
        extend_lens[s] >= 0 && extend_lens[s] <= INT32_MAX, function,
        ": extend_lens must be >= 0 and fit into int32, got ", extend_lens[s], " at index ", s
    );
  }
}

bool can_interleave(Lens extend_lens, int64_t cp_size, ForwardMode mode) {
  return is_context_parallel_extend(mode) && cp_size > 1 &&
         std::accumulate(extend_lens.begin(), extend_lens.end(), int64_t{0}) >= cp_size;
}

}  // namespace

std::string_view cp_strategy_name(CpStrategy strategy) {
  return kStrategyNames[static_cast<std::size_t>(strategy)].first;
}

CpStrategy parse_cp_strategy(std::string_view name, const char* function) {
  const auto* found =
      std::ranges::find(kStrategyNames, name, [](const auto& entry) { return entry.first; });
  check(
      found != kStrategyNames.end(), function,
      ": strategy must be 'zigzag' ('in-seq-split', 'head_tail'), 'interleave' "
      "('round-robin-split') or 'contiguous', got '",
      name, "'"
  );
  return found->second;
}

std::string_view kv_len_convention_name(KvLenConvention convention) {
  return convention == KvLenConvention::baked ? "baked" : "bare";
}

KvLenConvention parse_kv_len_convention(std::string_view name, const char* function) {
  check(
      name == "baked" || name == "bare", function,
      ": kv_len_convention must be 'baked' or 'bare', got '", name, "'"
  );
  return name == "baked" ? KvLenConvention::baked : KvLenConvention::bare;
}

bool can_apply_cp(
    Lens extend_lens,
    int64_t cp_size,
    CpStrategy strategy,
    std::optional<int64_t> num_tokens,
    std::optional<ForwardMode> mode
) {
  check_gate("can_apply_cp", extend_lens, cp_size);
  if (strategy == CpStrategy::interleave) {
    return mode && can_interleave(extend_lens, cp_size, *mode);
  }
  if (cp_size == 1 || (mode && !is_context_parallel_extend(*mode))) return false;
  const int64_t least = strategy == CpStrategy::zigzag ? 2 * cp_size : cp_size;
  const int64_t total = std::accumulate(extend_lens.begin(), extend_lens.end(), int64_t{0});
  return num_tokens.value_or(total) >= least &&
         std::ranges::all_of(extend_lens, [least](int64_t length) { return length >= least; });
}

bool can_dsa_prefill_cp_interleave(
    Lens extend_lens, int64_t cp_size, CpStrategy strategy, ForwardMode mode
) {
  check_gate("can_dsa_prefill_cp_interleave", extend_lens, cp_size);
  return strategy == CpStrategy::interleave && can_interleave(extend_lens, cp_size, mode);
}

}  // namespace cpattn
