// SPDX-License-Identifier: Apache-2.0
#pragma once

// Online softmax for tiles: each score is read once, straight from the product.
//
// There is no pass that finds the maximum first. A row's scores are taken
// against a reference from its earlier keys, and the rare one that outgrows it
// is found by what its probability became.
#include "kernels/amx_pack-inl.h"
#include "kernels/gemm_bf16-inl.h"
#include "kernels/softmax-inl.h"

namespace cpattn::kernels {
namespace {

/// The score that is a row's reference has probability 2^-7, so that others are
/// below 2 unless they outgrow it by 2^8. From 2 on, infinity and NaN included,
/// probabilities have this bit of their bfloat16 set.
constexpr float kHeadroom = 7.0F;
constexpr int16_t kGrownBit = 0x4000;

/// Where scores of row i are in the 2 x 2 tiles of a step, those against the
/// first 16 keys; those against the next 16 are kTileFloats behind.
inline unsigned score_offset(unsigned i) { return i * kLanes + i / kTileRows * kTileFloats; }

/// Up to 64 rows on their way through a block of keys.
struct SoftmaxGroup {
  float factor;             // from scores to base-2 units
  int column_tiles;         // of output
  int first_chunk;          // of this block that the rows see
  float* references;        // [row], scores; -inf before the first visible key
  float* sums;              // [row][16], of the probabilities before they were rounded
  float* output;            // [column tile][64 rows][16]
  Bfloat16* probabilities;  // [chunk][64 rows][32]

  Bfloat16* probabilities_of(int row, int chunk) const {
    return probabilities + (int64_t{chunk} * kGroupRows + row) * kTileDepth;
  }

  /// Rows [begin, end) of the 32 from `first_row` on: their probabilities for the
  /// 32 keys of a chunk, from `scores`, -inf for hidden keys.
  void add_scores(int first_row, int chunk, const float* scores, int begin, int end) const {
    const float* row_references = references + first_row;
    float* row_sums = sums + first_row * kLanes;
    Bfloat16* cells = probabilities_of(first_row, chunk);
    for (int i = begin; i < end; ++i) {
      const float* x = scores + score_offset(i);
      const Vector a = load(x);
      const Vector b = load(x + kTileFloats);
      // Less a reference of -inf, what a row sees first becomes +inf or NaN.
      const Vector reference = splat(row_references[i]);
      const Vector p = probability(a, reference);
      const Vector q = probability(b, reference);
      const auto word = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(q, p));
      if (__builtin_expect(_mm512_test_epi16_mask(word, _mm512_set1_epi16(kGrownBit)) != 0, 0)) {
        add_growing_scores(first_row + i, chunk, a, b);
        continue;
      }
      _mm512_store_si512(cells + i * kTileDepth, word);
      float* sum = row_sums + i * kLanes;
      store(sum, add(load(sum), add(p, q)));
    }
  }

 private:
  /// Subtracts before it scales: the products of huge scores are coarser than
  /// any exponent.
  Vector probability(Vector score, Vector reference) const {
    return exp2_less_half<4>(fma(sub(score, reference), splat(factor), splat(0.5F - kHeadroom)));
  }

  /// add_scores for a row that sees its first keys, or scores far above those
  /// before, or infinite ones or NaN, which make it NaN.
  [[gnu::noinline]] void add_growing_scores(int row, int chunk, Vector a, Vector b) const {
    const float infinity = __builtin_inff();
    Bfloat16* cells = probabilities_of(row, chunk);
    float* sum = sums + row * kLanes;
    const float top = reduce_max(max(a, b));
    const bool nan = _mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q) != 0 || top == infinity;
    if (nan) store(sum, splat(__builtin_nanf("")));
    if (nan || top == -infinity) {  // the latter: nothing visible so far
      _mm512_store_si512(cells, _mm512_setzero_si512());
      return;
    }
    raise_reference(row, chunk, top);
    const Vector p = probability(a, splat(top));
    const Vector q = probability(b, splat(top));
    store_probabilities(cells, p, q);
    store(sum, add(load(sum), add(p, q)));
  }

  /// Scales what was computed under the old reference, in this block as well.
  void raise_reference(int row, int chunk, float reference) const {
    const Vector shrink = splat(__builtin_exp2f((references[row] - reference) * factor));
    references[row] = reference;
    const auto scale = [&](float* x) { store(x, mul(load(x), shrink)); };
    scale(sums + row * kLanes);
    for (int d = 0; d < column_tiles; ++d) scale(output + (d * kGroupRows + row) * kLanes);
    for (int earlier = first_chunk; earlier < chunk; ++earlier) {
      Bfloat16* cells = probabilities_of(row, earlier);
      store_probabilities(cells, mul(load(cells), shrink), mul(load(cells + kLanes), shrink));
    }
  }
};

}  // namespace
}  // namespace cpattn::kernels
