// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string_view>

#include "cpattn/attention/paged_attention.h"
#include "cpattn/base/check.h"
#include "cpattn/base/tensor_view.h"

namespace cpattn::fia {

inline constexpr char kFunction[] = "npu_fused_infer_attention_score";
inline constexpr CheckFor require{kFunction};

/// A layout name, taken apart: "BNSD_BSND" reads BNSD and writes BSND.
struct Layout {
  std::string_view input, output;
  /// Sequences follow each other along one axis T.
  bool packed() const { return input.find('T') != std::string_view::npos; }
};

/// Takes the name of a layout apart. Throws std::invalid_argument, which lists the names, for
/// any other. The result points into `name`.
Layout parse_layout(std::string_view name);

/// The tensor with axes in the order [B, S, N, D], for any order in memory. `axes` names the
/// tensor's axes: H is N and D in one, T all tokens of a single B. Checks the rank and that there
/// are num_heads heads.
TensorView as_bsnd(
    const char* name, const TensorView& tensor, std::string_view axes, int64_t num_heads
);

/// Whether the rows (b, s) of a [B, S, N, D] view are one stride apart.
bool has_uniform_rows(const TensorView& bsnd);

/// The `count` batch entries from `first` on as [count * S, N, D]; more than one
/// only if has_uniform_rows().
TensorView rows_of(const TensorView& bsnd, int64_t first, int64_t count);

/// key, value or key_rope as a cache of pages: [blocks, block_size, H], or, with `by_head`,
/// [blocks, N, block_size, D].
PagedCache paged_blocks(
    const char* name, const TensorView& cache, int64_t num_heads, int64_t block_size, bool by_head
);

/// key, value or key_rope without pages. Each batch entry is one page, of no rows if there
/// are none; packed sequences are pages that start at any row.
PagedCache contiguous_blocks(
    const char* name, const TensorView& tensor, const Layout& layout, int64_t num_heads
);

}  // namespace cpattn::fia
