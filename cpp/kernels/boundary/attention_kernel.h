// SPDX-License-Identifier: Apache-2.0
#pragma once

// The boundary between ops and the kernels of dense attention: plain structs and function
// pointers. Kernels are compiled once per instruction set. They include only such boundaries,
// constants and each other from the project, so that no inline function leaks from them.
#include <stdint.h>

#include "cpattn/base/limits.h"

namespace cpattn::kernels {

/// Rows of a paged tensor, the first KV head already chosen. Row t of a sequence
/// is at data + pages[t / page_size] * page_stride + (t % page_size) * row_stride,
/// the row of the next head is head_stride further; strides count elements.
struct PagedRows {
  const void* data;
  int64_t page_stride;
  int64_t row_stride;
  int64_t head_stride = 0;
};

/// Element types of Q, K, V and out, as indices into the tables below.
enum ElementType { kFloat32, kFloat16, kBfloat16, kNumElementTypes };

/// The 8-bit formats of K and V. Every element type holds their numbers exactly.
enum CodeType { kFloat8E4M3, kFloat8E5M2, kInt8, kNumCodeTypes };

/// One number for every row of a paged tensor and KV head; strides count numbers.
struct RowFactors {
  PagedRows rows{};  // data is null if all are 1
  ElementType type = kFloat32;
};

/// Biases of a tile's scores, from its first token and head on. The sum of the given biases is
/// added to the score of a key j for a token at position p; strides count numbers.
struct TileBias {
  /// Null, or numbers of `type`: key j has the one at j * key_stride.
  const void* numbers = nullptr;
  ElementType type = kFloat32;
  int64_t token_stride = 0, head_stride = 0, key_stride = 0;
  /// Null, or a slope for each head: -slope * |j - p|.
  const float* alibi_slopes = nullptr;
  /// Null, or for each head a pointer to entry 0 of a table over j - p, clamped to [-max_distance,
  /// max_distance].
  const float* relative_bias = nullptr;
  int64_t max_distance = 0, relative_bias_head_stride = 0;
  /// Null, or ascending positions of token t and of key j, if successive keys are not neighbours in
  /// the sequence. All biases use these positions; the first row of numbers is of `first_position`.
  const int32_t* token_positions = nullptr;
  const int32_t* key_positions = nullptr;
  int64_t first_position = 0;
};

/// Dimensions of heads in memory.
struct StoredDims {
  int32_t nope_dim, rope_dim, v_head_dim;
};

/// The steps of a kernel that TileHooks::mark tells apart.
enum KernelScope : int32_t { kMarkPack, kMarkQk, kMarkSoftmax, kMarkPv, kMarkWrite };

/// The loops of attention. All give the same result, but not the same bits.
enum AttentionLoop : int32_t {
  kPacked,        // packs K and V, and multiplies with vectors: for many rows
  kInPlace,       // reads K and V in place, once and in the order of memory, with vectors
  kTiles,         // packs K and V into matrix tiles
  kFewRowTiles,   // the same for few rows, with the bits of kTiles
  kInPlaceTiles,  // loads K and V into matrix tiles in place
};

/// Rows of a tile in a tensor of tokens and heads: the row of token t and head g is t *
/// token_stride + g * head_stride elements after `data`.
template <class Data>
struct HeadRows {
  Data* data = nullptr;
  int64_t token_stride = 0, head_stride = 0;
};

/// The keys that the tokens of a tile see. Token t stands at key position
/// p = first_position + t * position_step and sees the keys j with p - left <= j <= p + right,
/// kv_begin <= j < kv_len, and key_ranges[2 * t] <= j < key_ranges[2 * t + 1] if there are ranges,
/// whose bit is set in its row of `mask`, if there is one. Keys that only the mask hides may be
/// read but do not count; other hidden keys are not read. p may lie outside [0, kv_len).
struct TileVisibility {
  int64_t kv_begin = 0;  // a multiple of kInPlaceGranule
  int64_t kv_len = 0;
  int64_t first_position = 0, position_step = 0;
  int64_t left = 0, right = 0;          // >= 0; kUnboundedKeys for no bound
  const int32_t* key_ranges = nullptr;  // null, or ranges whose begins and ends both ascend
  const uint8_t* mask = nullptr;        // null, or bits of row t from mask + t * mask_stride,
  int64_t mask_stride =
      0;  // bit j of byte j / 8 = key j is visible; readable to 32 keys past kv_len
};

/// The codes of a tile, if K, V and k_rope are codes.
struct TileCodes {
  /// Null for numbers, or AttentionKernel::expand_codes of `type`.
  void (*expand)(const char* const* rows, int n, int dim, const float* factors, void* elements) =
      nullptr;
  CodeType type = kFloat8E4M3;
  RowFactors k_factors{}, v_factors{};  // of rows of K and V
};

/// The memory that a tile's results go to. A row that sees no key gets zeros and LSE -inf.
struct TileResults {
  HeadRows<void> out;
  HeadRows<float> lse;          // data is null when not wanted
  float* max_logits = nullptr;  // null, or the largest score of each row, placed as its lse
  /// Null if the rows see no other keys. Otherwise the keys [kv_begin, kv_len) are one part of the
  /// keys that they see: the kernel leaves `out` and `lse` unchanged and writes the input of
  /// merge() to `partial`, in the order (KV head, token, head of the group): v_head_dim
  /// unnormalised outputs of every row, then kPartialStateFloats floats of every row.
  float* partial = nullptr;
};

/// Functions that a kernel calls while it runs.
struct TileHooks {
  /// Polled between blocks of keys. It may run any code on this thread, even kernels, which
  /// overwrite vector and tile registers.
  bool (*should_stop)(void* context) = nullptr;
  void* stop_context = nullptr;
  /// Null, or a tracer's function: this thread enters `scope`, which will do `flops` floating-point
  /// operations (0: not counted).
  void (*mark)(void* context, int32_t scope, int64_t flops) = nullptr;
  void* mark_context = nullptr;
};

/// The unit of work: attention of a few query tokens over one sequence, for num_kv_heads
/// neighbouring KV heads and the `group` query heads that share each of them.
struct AttentionTile {
  HeadRows<const void> q;
  HeadRows<const void> q_rope;  // data is null, or the last rope_dim dimensions of the queries
  PagedRows k, k_rope, v;
  const int32_t* pages;
  int64_t page_size;
  /// Null, or a function that makes the elements of a key from its row of stored_bytes bytes. The
  /// first v_head_dim elements are its value: `v` is not read. Strides of k still count elements.
  /// Only for one KV head.
  void (*expand)(const void* row, void* elements) = nullptr;
  int64_t stored_bytes = 0;
  TileCodes codes{};

  int32_t nope_dim;    // of q and k, beside rope_dim; a multiple of 16
  int32_t rope_dim;    // 0 or a multiple of 16
  int32_t v_head_dim;  // a multiple of 16
  /// Zeros if memory has all dimensions. Otherwise the numbers of dimensions in memory, which the
  /// sizes above round up to 16. Missing dimensions count as zeros and are neither read nor
  /// written. With `expand` keys have all dimensions.
  StoredDims stored{};
  int32_t num_tokens, group;
  int32_t num_kv_heads = 1;
  /// Whether the rows may have other bits than with kPacked and kTiles, whose bits do not depend on
  /// the other rows and heads of the tile. Never with `expand`.
  bool may_read_in_place = false;

  /// Whether bfloat16 kernels round only the result. Without it kPacked, kTiles and kFewRowTiles
  /// may also round the weights; loops that read in place never do.
  bool precise = false;

  TileVisibility seen{};
  float scale;
  float v_factor = 1.0F;  // of V, for all heads
  /// Null, or further factors of K and V for each of num_kv_heads heads.
  const float *k_head_factors = nullptr, *v_head_factors = nullptr;
  float softcap;       // 0: none, else c * tanh(score / c) after the scale
  TileBias bias{};     // after scale and softcap; -inf hides a key
  const float* sinks;  // null, or one logit per head

  TileResults results{};
  TileHooks hooks{};
};

struct AttentionKernel {
  /// The loop that run() takes for a tile.
  AttentionLoop (*choose)(const AttentionTile* tile);
  /// Scratch that run() needs for a tile of these dimensions, tokens and heads.
  int64_t (*scratch_bytes)(const AttentionTile* tile);
  /// Returns false if should_stop() ended it early. `scratch` is 64-byte aligned.
  bool (*run)(const AttentionTile* tile, void* scratch);
  /// Repeats the multiply-adds of packing loops `rounds` times, in registers, and returns the
  /// number of flops: the peak that the speed of run() is compared with.
  int64_t (*peak_flops)(int64_t rounds);
  /// elements[i * dim + j] = code j of rows[i], exact; or, unless factors is null, times factors[i]
  /// in float32, rounded to nearest even. n rows; dim is a multiple of 16.
  void (*expand_codes[kNumCodeTypes])(
      const char* const* rows, int n, int dim, const float* factors, void* elements
  );
  /// Writes out and lse of a tile whose keys were taken in num_parts parts; `parts` has their
  /// `partial` results, one after the other.
  void (*merge)(const AttentionTile* tile, const float* parts, int64_t num_parts);
};

/// Factors by which a merge multiplies the sum of the parts so far, and its next part.
struct MergeWeights {
  float sum, part;
};

/// Merges num_parts rows of n contiguous elements: sum = parts[0], then, one after the other,
/// sum = weights[i].sum * sum + weights[i].part * parts[i] in float32; out is the last sum, rounded
/// once. A weight of 0 ignores its operand, NaN included; weights[0].part counts as 1 unless it is
/// 0. `out` may be one of the parts.
using MergeRow = void (*)(
    const void* const* parts, const MergeWeights* weights, int64_t num_parts, void* out, int64_t n
);

/// LSE of several heads that are merged together: a multiple of the lanes of every vector.
constexpr int kMergeHeads = 16;

/// Merges LSE, natural logarithms, of the next part into those so far, [kMergeHeads] each, and
/// writes the weights of both to weights[h * stride] of the first `num_heads`. Without a key in
/// either, both weights are 0 and the LSE stays; weights below 2^-100 are 0, because products with
/// them could be subnormal and slow. NaN makes both NaN, unless the other part has no key.
using MergeLse =
    void (*)(float* lse, const float* next, MergeWeights* weights, int64_t stride, int num_heads);

struct KernelTable {
  const char* name;
  AttentionKernel attention[kNumElementTypes];
  MergeRow merge_row[kNumElementTypes];
  MergeLse merge_lse;
};

extern const KernelTable table_portable;
extern const KernelTable table_avx2;
extern const KernelTable table_avx512;
extern const KernelTable table_avx512bf16;
extern const KernelTable table_amxtwin;
extern const KernelTable table_amx;
extern const KernelTable table_neon;
extern const KernelTable table_neonbf16;

}  // namespace cpattn::kernels
