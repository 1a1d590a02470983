// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>

#include "cpattn/base/tensor_view.h"
#include "kernels/boundary/attention_kernel.h"

namespace cpattn {

/// Keys of one head at equal distances.
struct FlatRows {
  int64_t count = 0;
  int64_t stride = 0;  // in elements
};

/// Reads [rows, 1, width] or [pages, page_size, 1, width] as rows at equal distances. Throws
/// std::invalid_argument for another shape, and for pages that do not follow each other.
FlatRows flat_rows(const char* function, const char* name, const TensorView& tensor, int64_t width);

/// Returns [B, S, heads, dim]: packed tokens, [T, heads, dim], become those of one batch entry.
TensorView as_batch(const TensorView& tensor);

/// Attention of single tokens, each over keys that were selected for it, with all heads on one KV
/// head: the common part of the operators of sparse attention. Callers have checked everything.
struct SelectedAttention {
  const char* function;              // in traces
  TensorView q;                      // [B, S, num_heads, head_dim]; token t is (t / S, t % S)
  std::optional<TensorView> q_rope;  // of the same tokens and heads: more dimensions
  kernels::PagedRows k, k_rope, v;   // pages of one row
  int64_t v_head_dim = 0;
  int64_t max_keys = 0;          // of a token
  double scale = 1;              // multiplies q . k, > 0
  const float* sinks = nullptr;  // null, or one more logit per head

  /// Expands rows of k that are stored in another form, as in AttentionTile.
  void (*expand)(const void* row, void* elements) = nullptr;
  int64_t stored_bytes = 0;

  TensorView out;               // [B, S, num_heads, v_head_dim], dtype of q
  float* lse = nullptr;         // null, or contiguous [B, S, num_heads]
  float* max_logits = nullptr;  // null, or contiguous [B, S, num_heads]
};

/// Non-owning reference to a callable int64_t(int64_t token, int32_t* rows) that
/// writes the rows of a token's keys and returns their number, up to max_keys. A row that occurs
/// twice counts twice.
class SelectKeys {
 public:
  template <class F>
  SelectKeys(const F& function)  // NOLINT: implicit by design, like std::function_ref
      : object_(&function), call_([](const void* object, int64_t token, int32_t* rows) {
          return (*static_cast<const F*>(object))(token, rows);
        }) {}
  int64_t operator()(int64_t token, int32_t* rows) const { return call_(object_, token, rows); }

 private:
  const void* object_;
  int64_t (*call_)(const void*, int64_t, int32_t*);
};

/// Computes attention of every token over the keys that `select` names for it. A token without
/// keys gets zeros and -inf. Results depend neither on the other
/// tokens nor on the number of threads.
void attend_selected(const SelectedAttention& attention, SelectKeys select, int num_threads);

}  // namespace cpattn
