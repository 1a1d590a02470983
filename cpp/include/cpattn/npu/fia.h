// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cpattn/attention/attention_plan.h"
#include "cpattn/attention/paged_attention.h"
#include "cpattn/base/index_table.h"
#include "cpattn/base/tensor_view.h"

namespace cpattn {

namespace fia {
class Antiquant;
}

/// Scales and offsets of int8 codes, which stand for (code + offset) * scale. The operator's modes
/// have a number for each channel or for all (0), for each token (1), head (2), token and head (3);
/// modes 4 and 5 are 1 and 3 with tokens by their place in blocks. Numbers of modes 0 and 2 have
/// the dtype of query, others float32.
struct FiaAntiquant {
  int64_t mode = 0;
  std::optional<TensorView> scale;
  std::optional<TensorView> offset;
};

/// The arguments of npu_fused_infer_attention_score that have a meaning on a
/// CPU, under the operator's own names. Layouts are named by their axes; an underscore precedes the
/// layout of the output. B is the batch, T all tokens of the batch in a row, S the tokens of a
/// sequence (S1 of queries, S2 of keys), N heads, D the dimension of a head, H = N * D. Packed
/// layouts are those with T.
///
/// `query` has the axes of input_layout: [B, S1, H], [B, S1, N, D], [B, N, S1, D], [T, N, D] or
/// [N, T, D]. key and value have the same axes, with num_key_value_heads for N and S2 for S1; or
/// they are paged, [blocks, block_size, H] and, under BNSD and packed layouts, [blocks, N,
/// block_size, D]. They are float32, float16 or bfloat16, all of one dtype; or key and value are
/// int8, under layouts that are not packed and without rope.
struct FiaArguments {
  TensorView query, key, value;                    // value may have another D
  std::optional<TensorView> query_rope, key_rope;  // more dimensions of query and key: their
                                                   // shapes with another D
  /// bool, int8 or uint8; true hides. Modes 0 and 1: [S1, S2], [B or 1, S1, S2], [B or 1, 1, S1,
  /// S2], or [B, S2] if S1 is 1; modes 2 to 4: the template [2048, 2048].
  std::optional<TensorView> atten_mask;
  std::optional<std::vector<int64_t>> actual_seq_lengths;     // [B] or [1]; packed: running sums
  std::optional<std::vector<int64_t>> actual_seq_lengths_kv;  // the same of keys; paged: lengths
  std::optional<IndexTable> block_table;                      // [B, blocks of a sequence], if paged
  int64_t num_heads = 1;
  int64_t num_key_value_heads = 0;  // 0: as many as num_heads
  double scale = 1;
  int64_t pre_tokens = INT32_MAX;
  int64_t next_tokens = INT32_MAX;
  std::string input_layout = "BSH";
  int64_t sparse_mode = 0;
  int64_t inner_precise = 0;
  int64_t block_size = 0;  // tokens of a block, if paged
  FiaAntiquant antiquant;  // of int8 key and value: tensors [2, ...], modes 0 and 1
  FiaAntiquant key_antiquant, value_antiquant;  // the same apart; they count if both are given
  bool softmax_lse_flag = false;
};

/// A checked call, with views of the tensors of its arguments.
struct FiaPlan {
  std::vector<int64_t> out_shape;  // dtype of query
  std::vector<int64_t> lse_shape;  // float32; [1] without softmax_lse_flag
  /// Holds one plan if in every tensor all rows are one stride apart. Otherwise (several
  /// sequences of several tokens with the heads outside the tokens) it holds one for each
  /// sequence, and none if query is empty.
  std::vector<AttentionPlan> plans;

  AttentionArguments arguments;  // all but q, q_rope, out and lse
  TensorView query;              // as [B, S, N, D]; packed sequences have B = 1
  std::optional<TensorView> query_rope;
  std::string out_axes, lse_axes;

  /// Numbers of int8 key and value. If `expands`, there is a plan for each sequence, over its keys
  /// and values in the dtype of query, which run_fia() writes out for one sequence at a time.
  std::shared_ptr<const fia::Antiquant> antiquant;
  bool expands = false;
};

/// Checks the arguments and plans the work. Throws std::invalid_argument for whatever the
/// operator's documentation rules out: missing arguments, lengths, mask shapes, modes that a layout
/// does not have, page ids (which the NPU does not check). Limits of the chip are not enforced.
FiaPlan plan_fia(const FiaArguments& arguments);

/// Computes into contiguous out and lse of the planned shapes. lse is the
/// natural logarithm, -inf for a row that sees no key, whose out is zeros
/// whatever inner_precise says; without softmax_lse_flag it is a single 0.
void run_fia(const FiaPlan& plan, const TensorView& out, const TensorView& lse);

}  // namespace cpattn
