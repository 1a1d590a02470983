// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>

#include "cpattn/base/tensor_view.h"

/// Transforms queries and keys for the indexer, and stores its keys. All functions throw
/// std::invalid_argument, before anything is written, for shapes, dtypes and slots that do not fit
/// and for results that overlap an input.
namespace cpattn {

/// Computes out = x H * scale along the last dimension, where H is the Hadamard matrix in
/// Sylvester's order, H[i][j] = (-1)^popcount(i & j). Sums are in float32 and rounded once.
///   x    float32, float16 or bfloat16 [..., D], D a power of two; up to 6 dimensions
///   out  like x, contiguous
void hadamard_transform(const TensorView& x, float scale, const TensorView& out);

/// Quantises groups of 128 numbers, for each of which amax = max(|x|, 1e-4):
///   float8_e4m3fn  scale = amax / 448; if `power_of_two`, rounded up to a power of two
///   int8           scale = amax / 127
/// The codes are x / scale, rounded to nearest even. A group with an infinity or NaN has scale
/// NaN and codes 0x7f, in int8 0.
///   x      float32, float16 or bfloat16 [..., D], D a multiple of 128; up to 6 dimensions
///   codes  float8_e4m3fn or int8, like x, contiguous
///   scale  float32 [..., D / 128], contiguous
/// Errors begin with `function` and call x `name`.
void quantize_index(
    const TensorView& x,
    bool power_of_two,
    const TensorView& codes,
    const TensorView& scale,
    const char* function = "quantize_index",
    const char* name = "x"
);

/// Writes keys of the indexer into pages: codes of page_size tokens, 128 bytes each, then
/// their page_size float32 scales. A page of one token is a row of 132 bytes.
///   cache  uint8 [num_pages, page_size * 132]
///   slots  page * page_size + offset for each token; -1: not written. If tokens share
///          a slot, the last one stays.
///   codes  float8_e4m3fn, int8 or uint8 [T, 128] or [T, 1, 128]
///   scale  float32 [T] or [T, 1]
void write_index_k_cache(
    const TensorView& cache,
    std::span<const int64_t> slots,
    const TensorView& codes,
    const TensorView& scale
);

/// Reads back keys that write_index_k_cache wrote: codes float8_e4m3fn, int8 or uint8 [n, 128] and
/// scale float32 [n, 1] of n slots, each >= 0.
void read_index_k_cache(
    const TensorView& cache,
    std::span<const int64_t> slots,
    const TensorView& codes,
    const TensorView& scale
);

}  // namespace cpattn
