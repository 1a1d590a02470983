// SPDX-License-Identifier: Apache-2.0
#include "cpattn/sparse/split_norm.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "cpattn/base/check.h"
#include "ops/base/kernel_table.h"
#include "ops/base/rows.h"
#include "ops/base/tensor_checks.h"

namespace cpattn {
namespace {

/// A weight or bias as float32.
std::vector<float> parameter(
    const SplitNorm& arguments, const char* name, const TensorView& tensor, int64_t size
) {
  const char* function = arguments.function;
  check_tensor(function, name, tensor, 1);
  check(
      tensor.dim(0) == size, function, ": ", name, " must have ", size, " elements, got ",
      tensor.dim(0)
  );
  check(
      tensor.dtype == arguments.x.dtype || tensor.dtype == DType::float32, function, ": ", name,
      " must be float32 or of the dtype of x (", arguments.x.dtype, "), got ", tensor.dtype
  );
  std::vector<float> values(size);
  const auto type = element_type(function, name, tensor.dtype);
  active_sparse_kernels().rows.widen[type](tensor.data, size, values.data());
  return values;
}

/// One of the two norms.
class Norm {
 public:
  Norm(
      const SplitNorm& arguments,
      const char* weight_name,
      const TensorView& weight,
      const char* bias_name,
      const std::optional<TensorView>& bias,
      int64_t size,
      const char* eps_name,
      float eps
  )
      : run_(
            active_sparse_kernels()
                .rows.rms_norm[element_type(arguments.function, "x", arguments.x.dtype)]
        ),
        weight_(parameter(arguments, weight_name, weight, size)),
        eps_(eps) {
    if (bias) bias_ = parameter(arguments, bias_name, *bias, size);
    check(eps >= 0, arguments.function, ": ", eps_name, " must be >= 0, got ", eps);
  }
  void operator()(const char* x, char* out) const {
    run_(
        x, weight_.data(), bias_.empty() ? nullptr : bias_.data(),
        static_cast<int64_t>(weight_.size()), eps_, out
    );
  }

 private:
  void (*run_)(const void*, const float*, const float*, int64_t, float, void*);
  std::vector<float> weight_, bias_;
  float eps_;
};

/// The last dimension of x is that of q, of k_nope and of k_pe, one after the other.
void check_x(const SplitNorm& arguments) {
  const char* function = arguments.function;
  const int64_t q_rank = arguments.q_rank;
  const int64_t kv_rank = arguments.kv_rank;
  const int64_t rope_dim = arguments.rope_dim;
  check_tensor(function, "x", arguments.x, 2);
  check(
      q_rank > 0 && kv_rank > 0 && rope_dim >= 0, function,
      ": q_lora_rank and kv_lora_rank must be positive and qk_rope_head_dim not negative, got ",
      q_rank, ", ", kv_rank, " and ", rope_dim
  );
  check(
      std::max({q_rank, kv_rank, rope_dim}) <= INT32_MAX, function,
      ": q_lora_rank, kv_lora_rank and qk_rope_head_dim must fit into int32, got ", q_rank, ", ",
      kv_rank, " and ", rope_dim
  );
  check(
      arguments.x.dim(1) == q_rank + kv_rank + rope_dim, function,
      ": x must have q_lora_rank + kv_lora_rank + qk_rope_head_dim = ", q_rank + kv_rank + rope_dim,
      " columns, got shape ", ShapeOf{arguments.x}
  );
}

/// Results have a row for each of x, its dtype, and lie apart from it and from each other.
void check_results(const SplitNorm& arguments) {
  const char* function = arguments.function;
  const int64_t rows = arguments.x.dim(0);
  const int64_t kv_rank = arguments.kv_rank;
  const int64_t rope_dim = arguments.rope_dim;
  check_rows(function, "q", arguments.q, {rows, arguments.q_rank});
  check_rows(function, "k_nope", arguments.k_nope, {rows, 1, kv_rank});
  check_rows(function, "k_pe", arguments.k_pe, {rows, 1, rope_dim});
  if (arguments.latent) {
    check_rows(function, "latent", *arguments.latent, {rows, 1, kv_rank + rope_dim});
  }
  std::vector<std::pair<const char*, const TensorView*>> results = {
      {"q", &arguments.q}, {"k_nope", &arguments.k_nope}, {"k_pe", &arguments.k_pe}
  };
  if (arguments.latent) results.emplace_back("latent_cache", &*arguments.latent);
  for (std::size_t i = 0; i < results.size(); ++i) {
    const auto& [name, result] = results[i];
    check_dtype(function, name, result->dtype, arguments.x.dtype);
    check_no_overlap(function, name, *result, "x", arguments.x);
    for (std::size_t j = 0; j < i; ++j) {
      check_no_overlap(function, name, *result, results[j].first, *results[j].second);
    }
  }
}

}  // namespace

void split_qk_norm(const SplitNorm& arguments) {
  check_x(arguments);
  const TensorView& x = arguments.x;
  const Norm q_norm(
      arguments, "q_weight", arguments.q_weight, "q_bias", arguments.q_bias, arguments.q_rank,
      "q_eps", arguments.q_eps
  );
  const Norm kv_norm(
      arguments, "kv_weight", arguments.kv_weight, "kv_bias", arguments.kv_bias, arguments.kv_rank,
      "kv_eps", arguments.kv_eps
  );
  check_results(arguments);
  const int64_t bytes = element_size(x.dtype);
  const int64_t q_bytes = arguments.q_rank * bytes;
  const int64_t kv_bytes = arguments.kv_rank * bytes;
  const int64_t rope_bytes = arguments.rope_dim * bytes;
  parallel_rows(x.dim(0), x.dim(1) * bytes, [&](int64_t row, int64_t end) {
    for (; row < end; ++row) {
      const char* from = row_data(x, row);
      const char* kv = from + q_bytes;
      q_norm(from, row_data(arguments.q, row));
      kv_norm(kv, row_data(arguments.k_nope, row));
      if (rope_bytes > 0) std::memcpy(row_data(arguments.k_pe, row), kv + kv_bytes, rope_bytes);
      if (arguments.latent) {
        std::memcpy(row_data(*arguments.latent, row), kv, kv_bytes + rope_bytes);
      }
    }
  });
}

}  // namespace cpattn
