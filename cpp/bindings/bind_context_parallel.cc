// SPDX-License-Identifier: Apache-2.0
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "bindings/forward_mode_argument.h"
#include "bindings/index_argument.h"
#include "bindings/int_arrays.h"
#include "bindings/module.h"
#include "cpattn/check.h"
#include "cpattn/context_parallel.h"

namespace py = pybind11;

namespace cpattn::bindings {
namespace {

using Metadata = ContextParallelMetadata;

struct ArgumentNames {
  const char *function, *extend_lens, *seq_lens, *num_tokens, *cp_size;
};

/// Owns what a CpBatch borrows.
class BatchArgument {
 public:
  BatchArgument(
      const ArgumentNames& names,
      py::handle extend_lens,
      py::handle seq_lens,
      py::handle cp_size,
      std::string_view strategy,
      py::handle num_tokens,
      std::string_view kv_len_convention,
      bool compat
  ) {
    if (!extend_lens.is_none()) {
      batch_.extend_lens = extend_lens_ = index_list(extend_lens, names.extend_lens);
    }
    if (!seq_lens.is_none()) batch_.seq_lens = seq_lens_ = index_list(seq_lens, names.seq_lens);
    if (!num_tokens.is_none()) batch_.num_tokens = index_value(num_tokens, names.num_tokens);
    batch_.cp_size = index_value(cp_size, names.cp_size);
    batch_.strategy = parse_cp_strategy(strategy, names.function);
    batch_.kv_len_convention = parse_kv_len_convention(kv_len_convention, names.function);
    batch_.compat = compat;
  }
  const CpBatch& operator*() const { return batch_; }

 private:
  std::vector<int64_t> extend_lens_, seq_lens_;
  CpBatch batch_;
};

/// Leaves the GIL to other threads while metadata of many sequences is made. Leaving and taking it
/// costs 0.4 us, a fifth of what a single sequence takes.
class ReleaseForMany {
 public:
  explicit ReleaseForMany(const CpBatch& batch) {
    if (batch.extend_lens && batch.extend_lens->size() >= 64) release_.emplace();
  }

 private:
  std::optional<py::gil_scoped_release> release_;
};

Metadata build(
    py::handle extend_lens,
    py::handle seq_lens,
    py::handle cp_rank,
    py::handle cp_size,
    std::string_view strategy,
    py::handle num_tokens,
    std::string_view kv_len_convention,
    bool compat
) {
  static constexpr ArgumentNames kNames = {
      "build_cp_metadata", "build_cp_metadata: extend_lens", "build_cp_metadata: seq_lens",
      "build_cp_metadata: num_tokens", "build_cp_metadata: cp_size"
  };
  const BatchArgument batch(
      kNames, extend_lens, seq_lens, cp_size, strategy, num_tokens, kv_len_convention, compat
  );
  const int64_t rank = index_value(cp_rank, "build_cp_metadata: cp_rank");
  const ReleaseForMany nogil(*batch);
  return build_cp_metadata(*batch, rank);
}

py::list build_all_ranks(
    py::handle extend_lens,
    py::handle seq_lens,
    py::handle cp_size,
    std::string_view strategy,
    py::handle num_tokens,
    std::string_view kv_len_convention,
    bool compat
) {
  static constexpr ArgumentNames kNames = {
      "build_cp_metadata_all_ranks", "build_cp_metadata_all_ranks: extend_lens",
      "build_cp_metadata_all_ranks: seq_lens", "build_cp_metadata_all_ranks: num_tokens",
      "build_cp_metadata_all_ranks: cp_size"
  };
  const BatchArgument batch(
      kNames, extend_lens, seq_lens, cp_size, strategy, num_tokens, kv_len_convention, compat
  );
  std::vector<Metadata> built;
  {
    const ReleaseForMany nogil(*batch);
    built = build_cp_metadata_all_ranks(*batch);
  }
  py::list ranks;
  for (Metadata& rank : built) ranks.append(std::move(rank));
  return ranks;
}

bool can_apply(
    py::handle extend_lens,
    py::handle cp_size,
    std::string_view strategy,
    py::handle num_tokens,
    py::handle mode
) {
  std::optional<int64_t> tokens;
  if (!num_tokens.is_none()) tokens = index_value(num_tokens, "can_apply_cp: num_tokens");
  return can_apply_cp(
      index_list(extend_lens, "can_apply_cp: extend_lens"),
      index_value(cp_size, "can_apply_cp: cp_size"), parse_cp_strategy(strategy, "can_apply_cp"),
      tokens, optional_mode(mode, "can_apply_cp: forward_mode")
  );
}

bool can_dsa_interleave(
    py::handle extend_lens, py::handle cp_size, std::string_view strategy, py::handle mode
) {
  constexpr auto kFunction = "can_dsa_prefill_cp_interleave";
  const auto forward_mode = optional_mode(mode, "can_dsa_prefill_cp_interleave: forward_mode");
  return forward_mode && can_dsa_prefill_cp_interleave(
                             index_list(extend_lens, "can_dsa_prefill_cp_interleave: extend_lens"),
                             index_value(cp_size, "can_dsa_prefill_cp_interleave: cp_size"),
                             parse_cp_strategy(strategy, kFunction), *forward_mode
                         );
}

void register_forward_mode(py::module_& module) {
  const auto def = [&module](const char* name, bool (*predicate)(ForwardMode)) {
    module.def(name, [predicate](int mode) { return predicate(static_cast<ForwardMode>(mode)); });
  };
  const auto def_draft = [&module](const char* name, bool (*predicate)(ForwardMode, bool)) {
    module.def(name, [predicate](int mode, bool include_draft_extend_v2) {
      return predicate(static_cast<ForwardMode>(mode), include_draft_extend_v2);
    });
  };
  def_draft("is_extend", &is_extend);
  def_draft("is_context_parallel_extend", &is_context_parallel_extend);
  def("is_extend_without_speculative", &is_extend_without_speculative);
  def("is_extend_or_draft_extend_or_mixed", &is_extend_or_draft_extend_or_mixed);
  def("is_decode_or_idle", &is_decode_or_idle);
  def("is_cpu_graph", &is_cpu_graph);
  def("is_cuda_graph", &is_cuda_graph);
}

}  // namespace

// The GIL stays held: a build takes microseconds, and a busy thread that took
// the lock in between could keep it for milliseconds.
void register_context_parallel(py::module_& module) {
  register_forward_mode(module);
  register_context_parallel_metadata(module);
  module.def("build_cp_metadata", &build);
  module.def("build_cp_metadata_all_ranks", &build_all_ranks);
  module.def("can_apply_cp", &can_apply);
  module.def("can_dsa_prefill_cp_interleave", &can_dsa_interleave);
}

}  // namespace cpattn::bindings
