// SPDX-License-Identifier: Apache-2.0
#pragma once

// Online softmax for tiles: each score is read once, straight from the product.
//
// No pass finds the maximum first. A row's scores are taken against a reference from its earlier
// keys; the rare score that outgrows it shows in its probability.
#include "kernels/engines/amx/pack-inl.h"
#include "kernels/engines/gemm_bf16-inl.h"
#include "kernels/softmax/softmax-inl.h"

namespace cpattn::kernels {
namespace {

/// The score that is a row's reference has probability 2^-7, so that other probabilities are below
/// 2 unless scores outgrow it by 2^8. From 2 on, infinity and NaN included, probabilities have one
/// of these bits of their bfloat16 set: exponents that it cannot hold carry into the sign.
constexpr float kHeadroom = 7.0F;
inline bool outgrown(__m512i probabilities) {
  constexpr auto kTwoOrMore = static_cast<int16_t>(0xc000);
  return _mm512_test_epi16_mask(probabilities, _mm512_set1_epi16(kTwoOrMore)) != 0;
}

/// The bias of a row that has seen no scores yet, or has steep ones: all scores outgrow it.
constexpr float kNoBias = 0x1p100F;
/// A reference beyond this, in base-2 units, could make a row's bias wrong by whole powers of two.
constexpr float kSteep = 0x1p20F;

/// The exponent, in base 2, of the divisor of a row's probabilities.
inline float reference_exponent(float reference, float bias, float factor) {
  return bias == kNoBias ? reference * factor + kHeadroom : -bias;
}

/// The place of row i in the 2 x 2 tiles of a step's scores, for the first 16 keys; the scores for
/// the next 16 are kNextKeys further.
constexpr int kNextKeys = 2 * kTileFloats;
inline int score_offset(int i) { return i * kLanes; }

/// The running softmax of a group of up to 64 rows in a block of keys.
template <class T>
struct SoftmaxGroup {
  using Format = TileFormat<T>;
  static constexpr int kParts = Format::kWeightParts;
  static constexpr int kPartElements = kGroupRows * kTileDepth;

  float factor;                             // from scores to base-2 units
  int column_tiles;                         // of output
  int column_stride = kGroupRows * kLanes;  // floats from one column tile to the next
  int first_chunk;                          // that the rows see of the block
  float* references;                        // [row], scores; -inf before the first visible key
  float* biases;            // [row], which make a score the exponent of its probability
  float* sums;              // [row], of the probabilities below; unused if these are exact
  float* exact_sums;        // [row][16], of exact ones; null if not wanted
  float* output;            // [column tile][rows][16]
  Bfloat16* probabilities;  // [chunk][part][64 rows][32]

  /// The first parts of the probabilities; the rests are kPartElements further.
  Bfloat16* probabilities_of(int row, int chunk) const {
    return probabilities + chunk % kAmxChunks<T> * kParts * kPartElements + row * kTileDepth;
  }

  /// The probability of one packed key of the block.
  float probability_of(int row, int key) const {
    const Bfloat16* cell =
        probabilities_of(row, key / kTileDepth) + Format::word_of(key % kTileDepth);
    float sum = Bfloat16Engine::probability(cell);
    if constexpr (kParts == 2) sum += Bfloat16Engine::probability(cell + kPartElements);
    return sum;
  }

  /// Sixteen of the probabilities, from a cell of their first parts on. Subnormal bits read as 0,
  /// as tiles count them.
  static Vector load_parts(const Bfloat16* cells) {
    Vector sum = load(cells);
    if constexpr (kParts == 2) return add(sum, load(cells + kPartElements));
    const __mmask16 normal = _mm512_cmp_epu32_mask(
        _mm512_castps_si512(sum), _mm512_set1_epi32(0x00800000), _MM_CMPINT_NLT
    );
    return _mm512_maskz_mov_ps(normal, sum);
  }

  /// Takes the scores of a row that may see its first keys, or scores that outgrow its
  /// reference, or infinities or NaN, which make the row NaN.
  [[gnu::noinline]] void add_scores(int row, int chunk, const float* scores) const {
    const Vector a = load(scores);
    const Vector b = load(scores + kNextKeys);
    const float infinity = __builtin_inff();
    if (references[row] != -infinity && try_add(row, chunk, a, b)) return;
    const float top = reduce_max(max(a, b));
    const bool nan = _mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q) != 0 || top == infinity;
    if (nan) spoil(row);
    if (nan || top == -infinity) {  // the latter: nothing visible so far
      store_parts(splat(0.0F), splat(0.0F), probabilities_of(row, chunk));
      return;
    }
    raise_reference(row, chunk, top);
    try_add(row, chunk, a, b);
  }

 private:
  Vector exponent(int row, Vector score) const {
    if (biases[row] != kNoBias) return fma(score, splat(factor), splat(biases[row]));
    // Subtracts before it scales: the products of huge scores are coarser than any exponent.
    return fma(sub(score, splat(references[row])), splat(factor), splat(-kHeadroom));
  }

  /// Returns false, and does nothing, if a score outgrows the reference.
  bool try_add(int row, int chunk, Vector a, Vector b) const {
    const Vector x = exponent(row, a);
    const Vector y = exponent(row, b);
    __m512i parts[kParts];
    Format::probabilities(typename Format::Exponential(), x, y, parts);
    if (outgrown(parts[0])) return false;
    Bfloat16* cells = probabilities_of(row, chunk);
    for (int part = 0; part < kParts; ++part) {
      _mm512_store_si512(cells + part * kPartElements, parts[part]);
    }
    if (exact_sums != nullptr) {
      const ExactExp2 exp2;
      float* sum = exact_sums + row * kLanes;
      store(sum, add(load(sum), add(exp2(x), exp2(y))));
    }
    return true;
  }

  void spoil(int row) const {
    sums[row] = __builtin_nanf("");
    if (exact_sums != nullptr) store(exact_sums + row * kLanes, splat(__builtin_nanf("")));
  }

  static void store_parts(Vector p, Vector q, Bfloat16* cells) {
    __m512i parts[kParts];
    Format::split(p, q, parts);
    for (int part = 0; part < kParts; ++part) {
      _mm512_store_si512(cells + part * kPartElements, parts[part]);
    }
  }

  /// Scales results under the old reference, in this block as well.
  void raise_reference(int row, int chunk, float reference) const {
    const float top = reference * factor;
    const float bias = __builtin_fabsf(top) <= kSteep ? -top - kHeadroom : kNoBias;
    // Exponents of steep rows may be infinite.
    const float growth = bias == kNoBias && biases[row] == kNoBias
                             ? (reference - references[row]) * factor
                             : reference_exponent(reference, bias, factor) -
                                   reference_exponent(references[row], biases[row], factor);
    references[row] = reference;
    biases[row] = bias;
    sums[row] *= shrink_by(-growth);
    const Vector shrink = splat(shrink_by(-growth));
    const auto scale = [&](float* x) { store(x, mul(load(x), shrink)); };
    if (exact_sums != nullptr) scale(exact_sums + row * kLanes);
    for (int d = 0; d < column_tiles; ++d) scale(output + d * column_stride + row * kLanes);
    for (int earlier = first_chunk; earlier < chunk; ++earlier) {
      Bfloat16* cells = probabilities_of(row, earlier);
      store_parts(mul(load_parts(cells), shrink), mul(load_parts(cells + kLanes), shrink), cells);
    }
  }
};

}  // namespace
}  // namespace cpattn::kernels
