// SPDX-License-Identifier: Apache-2.0
#include <optional>
#include <utility>
#include <vector>

#include "bindings/arguments/arguments.h"
#include "bindings/context_parallel/forward_mode_argument.h"
#include "bindings/module.h"
#include "cpattn/context_parallel/context_parallel.h"

namespace py = pybind11;

namespace cpattn::bindings {
namespace {

using Metadata = ContextParallelMetadata;

/// Owns the memory that a CpBatch borrows.
class BatchArgument {
 public:
  BatchArgument(
      const Arguments& read,
      py::handle extend_lens,
      py::handle seq_lens,
      py::handle cp_size,
      py::handle strategy,
      py::handle num_tokens,
      py::handle kv_len_convention,
      py::handle compat,
      py::handle weights,
      py::handle page_size
  ) {
    if (!extend_lens.is_none()) {
      batch_.extend_lens = extend_lens_ = read.ints(extend_lens, "extend_lens");
    }
    if (!seq_lens.is_none()) batch_.seq_lens = seq_lens_ = read.ints(seq_lens, "seq_lens");
    batch_.num_tokens = read.optional_integer(num_tokens, "num_tokens");
    batch_.cp_size = read.integer(cp_size, "cp_size");
    batch_.strategy = strategy_of(read, strategy);
    batch_.kv_len_convention =
        parse_kv_len_convention(read.text(kv_len_convention, "kv_len_convention"), read.function());
    batch_.compat = read.flag(compat, "compat");
    if (!weights.is_none()) batch_.weights = *(weights_ = read.optional_reals(weights, "weights"));
    batch_.page_size = read.optional_integer(page_size, "page_size");
  }
  const CpBatch& operator*() const { return batch_; }

  static CpStrategy strategy_of(const Arguments& read, py::handle strategy) {
    return parse_cp_strategy(read.text(strategy, "strategy"), read.function());
  }

 private:
  std::vector<int64_t> extend_lens_, seq_lens_;
  std::optional<std::vector<double>> weights_;
  CpBatch batch_;
};

/// Releases the GIL while metadata of many sequences is made. Releasing and taking it costs 0.4 us,
/// a fifth of the time of a single sequence.
class ReleaseForMany {
 public:
  explicit ReleaseForMany(const CpBatch& batch) {
    if (batch.extend_lens && batch.extend_lens->size() >= 64) release_.emplace();
  }

 private:
  std::optional<GilRelease> release_;
};

Metadata build(
    py::handle extend_lens,
    py::handle seq_lens,
    py::handle cp_rank,
    py::handle cp_size,
    py::handle strategy,
    py::handle num_tokens,
    py::handle kv_len_convention,
    py::handle compat,
    py::handle weights,
    py::handle page_size
) {
  const Arguments read("build_cp_metadata");
  const BatchArgument batch(
      read, extend_lens, seq_lens, cp_size, strategy, num_tokens, kv_len_convention, compat,
      weights, page_size
  );
  const int64_t rank = read.integer(cp_rank, "cp_rank");
  const ReleaseForMany nogil(*batch);
  return build_cp_metadata(*batch, rank);
}

py::list build_all_ranks(
    py::handle extend_lens,
    py::handle seq_lens,
    py::handle cp_size,
    py::handle strategy,
    py::handle num_tokens,
    py::handle kv_len_convention,
    py::handle compat,
    py::handle weights,
    py::handle page_size
) {
  const Arguments read("build_cp_metadata_all_ranks");
  const BatchArgument batch(
      read, extend_lens, seq_lens, cp_size, strategy, num_tokens, kv_len_convention, compat,
      weights, page_size
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
    py::handle strategy,
    py::handle num_tokens,
    py::handle mode
) {
  const Arguments read("can_apply_cp");
  return can_apply_cp(
      read.ints(extend_lens, "extend_lens"), read.integer(cp_size, "cp_size"),
      BatchArgument::strategy_of(read, strategy), read.optional_integer(num_tokens, "num_tokens"),
      optional_mode(mode, read.name("forward_mode"))
  );
}

bool can_dsa_interleave(
    py::handle extend_lens, py::handle cp_size, py::handle strategy, py::handle mode
) {
  const Arguments read("can_dsa_prefill_cp_interleave");
  const std::vector<int64_t> lens = read.ints(extend_lens, "extend_lens");
  const int64_t size = read.integer(cp_size, "cp_size");
  const CpStrategy parsed = BatchArgument::strategy_of(read, strategy);
  const auto forward_mode = optional_mode(mode, read.name("forward_mode"));
  return forward_mode && can_dsa_prefill_cp_interleave(lens, size, parsed, *forward_mode);
}

void register_forward_mode(py::module_& module) {
  const auto def = [&module](const char* name, bool (*predicate)(ForwardMode)) {
    module.def(name, [predicate](int mode) { return predicate(static_cast<ForwardMode>(mode)); });
  };
  const auto def_draft = [&module](const char* name, bool (*predicate)(ForwardMode, bool)) {
    module.def(name, [predicate](int mode, py::handle include_draft_extend_v2) {
      const Arguments read("ForwardMode");
      return predicate(
          static_cast<ForwardMode>(mode),
          read.flag(include_draft_extend_v2, "include_draft_extend_v2")
      );
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

// The GIL stays held: a build takes microseconds, and a busy thread that took the GIL meanwhile
// could keep it for milliseconds.
void register_context_parallel(py::module_& module) {
  register_forward_mode(module);
  register_context_parallel_metadata(module);
  module.def("build_cp_metadata", &build);
  module.def("build_cp_metadata_all_ranks", &build_all_ranks);
  module.def("can_apply_cp", &can_apply);
  module.def("can_dsa_prefill_cp_interleave", &can_dsa_interleave);
}

}  // namespace cpattn::bindings
