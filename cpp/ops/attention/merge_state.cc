// SPDX-License-Identifier: Apache-2.0
#include "cpattn/attention/merge_state.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "cpattn/base/check.h"
#include "cpattn/base/parallel.h"
#include "cpattn/base/trace.h"
#include "ops/base/kernel_table.h"
#include "ops/base/tensor_checks.h"

namespace cpattn {
namespace {

using kernels::KernelTable;
using kernels::kMergeHeads;
using kernels::MergeWeights;

constexpr int64_t kItemBytes = 1 << 19;  // of all parts that a thread takes at once
constexpr float kInfinity = std::numeric_limits<float>::infinity();

enum class Form { pair, list, stacked };

/// Names of arguments in errors, by their kind, "out" or "lse"; names of parts are made only on
/// failure.
struct Names {
  const char* function;
  Form form;

  std::string part(const char* kind, std::size_t i) const {
    if (form == Form::pair) return concat(kind, "_", "ab"[i]);
    return concat(kind, form == Form::list ? "s[" : "s[:, ", i, "]");
  }
  const char* first_out() const {
    return form == Form::pair ? "out_a" : form == Form::list ? "outs[0]" : "outs[:, 0]";
  }
  const char* out() const { return form == Form::pair ? "out_a" : "out"; }
  const char* lse() const { return form == Form::pair ? "lse_a" : "lse"; }
};

/// Parts that are merged, and the tensors that the result goes to.
struct Merged {
  std::span<const TensorView> outs, lses;
  const std::optional<TensorView>& sinks;
  const TensorView &out, &lse;
};

/// Checks rows and their LSE to be like the first part; `name_of` makes a name of a kind.
template <class NameOf>
void check_like(
    const char* function,
    NameOf name_of,
    const TensorView& out,
    const TensorView& lse,
    const TensorView& first
) {
  if (out.dtype != first.dtype || out.rank != first.rank || out.shape != first.shape ||
      !out.last_dim_contiguous()) {
    const std::string name = name_of("out");
    check_dtype(function, name.c_str(), out.dtype, first.dtype);
    check_rows(function, name.c_str(), out, {first.shape[0], first.shape[1], first.shape[2]});
  }
  const bool fits =
      lse.rank == 2 && lse.shape[0] == first.shape[0] && lse.shape[1] == first.shape[1];
  if (!fits || lse.dtype != DType::float32) {
    const std::string name = name_of("lse");
    check_dtype(function, name.c_str(), lse.dtype, DType::float32);
    check_shape(function, name.c_str(), lse, {first.shape[0], first.shape[1]});
  }
}

void check_no_infinity(const Names& names, std::size_t part, const TensorView& lse) {
  const int64_t stride = lse.strides[1];
  for (int64_t t = 0; t < lse.shape[0]; ++t) {
    const float* values = lse.as<float>() + t * lse.strides[0];
    bool found = false;
    if (stride == 1) {  // which compilers vectorise
      for (int64_t h = 0; h < lse.shape[1]; ++h) found |= values[h] == kInfinity;
    } else {
      for (int64_t h = 0; h < lse.shape[1]; ++h) found |= values[h * stride] == kInfinity;
    }
    if (!found) [[likely]]
      continue;
    int64_t h = 0;
    while (values[h * stride] != kInfinity) ++h;
    check(
        false, names.function, ": ", names.part("lse", part),
        " must not be +inf (a row without keys has -inf), got +inf at [", t, ", ", h, "]"
    );
  }
}

/// Checks all but overlaps; returns the type of the parts.
kernels::ElementType check_arguments(const Names& names, const Merged& merged) {
  const char* function = names.function;
  const std::size_t num_parts = merged.outs.size();
  check(num_parts > 0, function, ": outs must have at least one part, got 0");
  check(
      merged.lses.size() == num_parts, function, ": lses must have ", num_parts,
      " parts, as outs have, got ", merged.lses.size()
  );
  const TensorView& first = merged.outs[0];
  const kernels::ElementType type = element_type(function, names.first_out(), first.dtype);
  check_tensor(function, names.first_out(), first, 3);
  for (std::size_t i = 0; i < num_parts; ++i) {
    const auto name_of = [&](const char* kind) { return names.part(kind, i); };
    check_like(function, name_of, merged.outs[i], merged.lses[i], first);
    check_no_infinity(names, i, merged.lses[i]);
  }
  const auto name_of = [&](const char* kind) { return kind[0] == 'o' ? names.out() : names.lse(); };
  check_like(function, name_of, merged.out, merged.lse, first);
  if (merged.sinks) {
    check_dtype(function, "sinks", merged.sinks->dtype, DType::float32);
    check_rows(function, "sinks", *merged.sinks, {first.shape[1]});
  }
  return type;
}

/// Checks that a result shares memory with no argument, except `own`, which may be the result
/// itself.
void check_apart(
    const Names& names,
    const Merged& merged,
    const char* name,
    const TensorView& result,
    const TensorView& own
) {
  bool is_first = result.data == own.data;
  for (int axis = 0; axis < own.rank; ++axis) {
    is_first = is_first && (own.dim(axis) == 1 || result.stride(axis) == own.stride(axis));
  }
  const auto against = [&](const TensorView& other, auto name_of) {
    if (!may_overlap(result, other)) return;
    const bool is_own = &other == &own && is_first;
    check(is_own, names.function, ": ", name, " must not overlap ", name_of(), " in memory");
  };
  for (std::size_t i = 0; i < merged.outs.size(); ++i) {
    against(merged.outs[i], [&] { return names.part("out", i); });
    against(merged.lses[i], [&] { return names.part("lse", i); });
  }
  if (merged.sinks) against(*merged.sinks, [] { return "sinks"; });
}

/// The call that threads share; each row is merged by one of them.
class Merge {
 public:
  Merge(const char* function, const Merged& merged, kernels::ElementType type)
      : function_(function),
        merged_(merged),
        num_parts_(static_cast<int64_t>(merged.outs.size())),
        num_steps_(num_parts_ + (merged.sinks ? 1 : 0)),
        kernels_(active_kernels()),
        type_(type) {}

  void run() const {
    const int64_t tokens = merged_.out.shape[0], heads = merged_.out.shape[1];
    const int64_t token_bytes =
        heads * merged_.out.shape[2] * element_size(merged_.out.dtype) * num_parts_;
    const int64_t at_once = std::max<int64_t>(kItemBytes / std::max<int64_t>(token_bytes, 1), 1);
    parallel_for(
        (tokens + at_once - 1) / at_once, default_num_threads(), [&](int64_t item, StopToken&) {
          const TraceSpan span(TraceScope::merge);
          const Scratch scratch = take_scratch();
          const int64_t end = std::min((item + 1) * at_once, tokens);
          for (int64_t t = item * at_once; t < end; ++t) {
            for (int64_t h = 0; h < heads; h += kMergeHeads) {
              merge_heads(t, h, std::min(h + kMergeHeads, heads), scratch);
            }
          }
        }
    );
  }

 private:
  struct Scratch {
    MergeWeights* weights;  // [kMergeHeads][num_steps]
    const void** rows;      // [num_steps]
  };

  Scratch take_scratch() const {
    const int64_t num_weights = kMergeHeads * num_steps_;
    const std::size_t bytes = num_weights * sizeof(MergeWeights) + num_steps_ * sizeof(void*);
    void* memory = thread_scratch(function_, bytes);
    auto* weights = static_cast<MergeWeights*>(memory);
    return {weights, reinterpret_cast<const void**>(weights + num_weights)};
  }

  static float& lse_at(const TensorView& lse, int64_t t, int64_t h) {
    return lse.as<float>()[t * lse.strides[0] + h * lse.strides[1]];
  }
  char* row_at(const TensorView& out, int64_t t, int64_t h) const {
    return out.as<char>() + (t * out.strides[0] + h * out.strides[1]) * element_size(out.dtype);
  }

  void merge_heads(int64_t t, int64_t begin, int64_t end, const Scratch& scratch) const {
    weigh_heads(t, begin, end, scratch.weights);
    for (int64_t h = begin; h < end; ++h) {
      for (int64_t i = 0; i < num_parts_; ++i) scratch.rows[i] = row_at(merged_.outs[i], t, h);
      if (num_steps_ > num_parts_) scratch.rows[num_parts_] = scratch.rows[0];  // not read
      kernels_.merge_row[type_](
          scratch.rows, scratch.weights + (h - begin) * num_steps_, num_steps_,
          row_at(merged_.out, t, h), merged_.out.shape[2]
      );
    }
  }

  /// Writes the weights of some heads, [end - begin][num_steps], and their merged LSE.
  void weigh_heads(int64_t t, int64_t begin, int64_t end, MergeWeights* weights) const {
    const auto count = static_cast<int>(end - begin);
    float lse[kMergeHeads], next[kMergeHeads];
    std::fill_n(lse, kMergeHeads, -kInfinity);
    std::fill_n(next, kMergeHeads, -kInfinity);
    for (int h = 0; h < count; ++h) {
      lse[h] = lse_at(merged_.lses[0], t, begin + h);
      weights[h * num_steps_] = {0.0F, lse[h] == -kInfinity ? 0.0F : 1.0F};
    }
    for (int64_t i = 1; i < num_parts_; ++i) {
      for (int h = 0; h < count; ++h) next[h] = lse_at(merged_.lses[i], t, begin + h);
      kernels_.merge_lse(lse, next, weights + i, num_steps_, count);
    }
    for (int h = 0; h < count; ++h) lse_at(merged_.lse, t, begin + h) = lse[h];
    if (!merged_.sinks) return;
    for (int h = 0; h < count; ++h) {
      next[h] = merged_.sinks->as<float>()[(begin + h) * merged_.sinks->strides[0]];
    }
    kernels_.merge_lse(lse, next, weights + num_parts_, num_steps_, count);
    for (int h = 0; h < count; ++h) {  // a sink adds nothing
      MergeWeights& weight = weights[h * num_steps_ + num_parts_];
      weight = {next[h] == kInfinity ? 0.0F : weight.sum, 0.0F};
    }
  }

  const char* const function_;
  const Merged& merged_;
  const int64_t num_parts_;
  const int64_t num_steps_;  // including the sink's
  const KernelTable& kernels_;
  const kernels::ElementType type_;
};

void merge(const Names& names, const Merged& merged) {
  const auto type = check_arguments(names, merged);
  check_no_overlap(names.function, names.out(), merged.out, names.lse(), merged.lse);
  check_apart(names, merged, names.out(), merged.out, merged.outs[0]);
  check_apart(names, merged, names.lse(), merged.lse, merged.lses[0]);
  Merge(names.function, merged, type).run();
}

/// Views of the first parts of a tensor, whose second dimension numbers them.
std::vector<TensorView> unstack(const TensorView& stacked, int64_t num_parts) {
  TensorView part = stacked;
  part.rank = stacked.rank - 1;
  std::copy(stacked.shape.begin() + 2, stacked.shape.end(), part.shape.begin() + 1);
  std::copy(stacked.strides.begin() + 2, stacked.strides.end(), part.strides.begin() + 1);
  std::vector<TensorView> parts(num_parts, part);
  const int64_t bytes = stacked.strides[1] * element_size(stacked.dtype);
  for (std::size_t i = 0; i < parts.size(); ++i) {
    parts[i].data = stacked.as<char>() + static_cast<int64_t>(i) * bytes;
  }
  return parts;
}

}  // namespace

void merge_state(
    const TensorView& out_a,
    const TensorView& lse_a,
    const TensorView& out_b,
    const TensorView& lse_b
) {
  const TensorView outs[] = {out_a, out_b}, lses[] = {lse_a, lse_b};
  merge({"merge_state", Form::pair}, {outs, lses, std::nullopt, out_a, lse_a});
}

void merge_states(
    std::span<const TensorView> outs,
    std::span<const TensorView> lses,
    const std::optional<TensorView>& sinks,
    const TensorView& out,
    const TensorView& lse
) {
  merge({"merge_states", Form::list}, {outs, lses, sinks, out, lse});
}

void merge_states(
    const TensorView& outs,
    const TensorView& lses,
    const std::optional<TensorView>& sinks,
    const TensorView& out,
    const TensorView& lse
) {
  constexpr char kFunction[] = "merge_states";
  check_tensor(kFunction, "outs", outs, 4);
  check_shape(kFunction, "lses", lses, {outs.shape[0], outs.shape[1], outs.shape[2]});
  // Tensors without elements may have any number of parts: checking one is enough.
  const int64_t most = lses.num_elements() == 0 ? 1 : lses.shape[1];
  const int64_t num_parts = std::min(lses.shape[1], most);
  const std::vector<TensorView> parts = unstack(outs, num_parts);
  const std::vector<TensorView> lses_of_parts = unstack(lses, num_parts);
  merge({kFunction, Form::stacked}, {parts, lses_of_parts, sinks, out, lse});
}

}  // namespace cpattn
