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
inline bool outgrown(__m512i probabilities) {
  return _mm512_test_epi16_mask(probabilities, _mm512_set1_epi16(0x4000)) != 0;
}

/// 2^(i / 16).
alignas(64) constexpr float kSixteenths[] = {
    1.0F,        1.04427373F, 1.09050775F, 1.13878858F, 1.18920708F, 1.24185777F,
    1.29683959F, 1.35425556F, 1.41421354F, 1.47682619F, 1.54221082F, 1.61049032F,
    1.68179286F, 1.75625217F, 1.8340081F,  1.91520655F,
};

/// 2^x to 5.4e-7 for any x: -inf gives 0, +inf itself. Beside products only one
/// port does arithmetic. So the sixteenths of x are looked up, with a shuffle, and
/// a quadratic does for the rest of it: five operations there instead of the six of
/// exp2_less_half<4>.
inline Vector exp2_unclamped(Vector x) {
  constexpr int kToSixteenths = 4 << 4 | _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  const Vector rest = _mm512_reduce_ps(x, kToSixteenths);  // 0 for an infinity
  // A float of this size has its sixteenths in the lowest four bits.
  const __m512i index = _mm512_castps_si512(add(x, splat(0x1.8p19F)));
  const Vector power = _mm512_permutexvar_ps(index, _mm512_load_ps(kSixteenths));
  const Vector slope = fma(rest, splat(0.240226433F), splat(0.693187714F));
  // vscalefps takes the floor of the exponent, and underflows to 0.
  return scale_by_power(fma(mul(power, rest), slope, power), sub(x, rest));
}

/// Where scores of row i are in the 2 x 2 tiles of a step, those against the
/// first 16 keys; those against the next 16 are kTileFloats behind.
inline unsigned score_offset(unsigned i) { return i * kLanes + i / kTileRows * kTileFloats; }

/// Up to 64 rows on their way through a block of keys.
template <class T>
struct SoftmaxGroup {
  using Format = TileFormat<T>;
  static constexpr int kParts = Format::kParts;
  static constexpr int kPartElements = kGroupRows * kTileDepth;

  float factor;             // from scores to base-2 units
  int column_tiles;         // of output
  int first_chunk;          // that the rows see of the block
  float* references;        // [row], scores; -inf before the first visible key
  float* sums;              // [row][16], of the probabilities before they were rounded
  float* output;            // [column tile][64 rows][16]
  Bfloat16* probabilities;  // [chunk][part][64 rows][32]

  /// The first parts; the rests are kPartElements behind.
  Bfloat16* probabilities_of(int row, int chunk) const {
    return probabilities + chunk % kAmxChunks<T> * kParts * kPartElements + row * kTileDepth;
  }

  /// The probability of one packed key of the block.
  float probability_of(int row, int key) const {
    const Bfloat16* cell = probabilities_of(row, key / kTileDepth) + key % kTileDepth;
    float sum = Bfloat16Engine::probability(cell);
    if constexpr (kParts == 2) sum += Bfloat16Engine::probability(cell + kPartElements);
    return sum;
  }

  /// Subtracts before it scales: the products of huge scores are coarser than
  /// any exponent.
  static Vector probability(Vector score, Vector reference, Vector factor) {
    return exp2_unclamped(fma(sub(score, reference), factor, splat(-kHeadroom)));
  }

  /// Adds the probabilities of one row for 32 keys, which are in `parts` as well.
  static void add_probabilities(
      Vector p, Vector q, const __m512i* parts, float* sum, Bfloat16* cells
  ) {
    for (int part = 0; part < kParts; ++part, cells += kPartElements) {
      _mm512_store_si512(cells, parts[part]);
    }
    store(sum, add(load(sum), add(p, q)));
  }

  /// The same from scores, for a row that may see its first keys, or scores far
  /// above those before, or infinite ones or NaN, which make it NaN.
  [[gnu::noinline]] void add_scores(int row, int chunk, const float* scores) const {
    const Vector a = load(scores);
    const Vector b = load(scores + kTileFloats);
    if (try_add(row, chunk, a, b)) return;
    const float infinity = __builtin_inff();
    const float top = reduce_max(max(a, b));
    const bool nan = _mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q) != 0 || top == infinity;
    if (nan) store(sums + row * kLanes, splat(__builtin_nanf("")));
    if (nan || top == -infinity) {  // the latter: nothing visible so far
      store_parts(splat(0.0F), splat(0.0F), probabilities_of(row, chunk));
      return;
    }
    raise_reference(row, chunk, top);
    try_add(row, chunk, a, b);
  }

 private:
  /// False, and nothing is done, if a score outgrows the reference.
  bool try_add(int row, int chunk, Vector a, Vector b) const {
    const Vector reference = splat(references[row]);
    const Vector p = probability(a, reference, splat(factor));
    const Vector q = probability(b, reference, splat(factor));
    __m512i parts[kParts];
    Format::split(p, q, parts);
    if (outgrown(parts[0])) return false;
    add_probabilities(p, q, parts, sums + row * kLanes, probabilities_of(row, chunk));
    return true;
  }

  static void store_parts(Vector p, Vector q, Bfloat16* cells) {
    __m512i parts[kParts];
    Format::split(p, q, parts);
    for (int part = 0; part < kParts; ++part) {
      _mm512_store_si512(cells + part * kPartElements, parts[part]);
    }
  }

  static Vector load_parts(const Bfloat16* cells) {
    Vector sum = load(cells);
    if constexpr (kParts == 2) sum = add(sum, load(cells + kPartElements));
    return sum;
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
      store_parts(mul(load_parts(cells), shrink), mul(load_parts(cells + kLanes), shrink), cells);
    }
  }
};

}  // namespace
}  // namespace cpattn::kernels
