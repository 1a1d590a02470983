// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <vector>

#include "cpattn/attention/paged_attention.h"
#include "cpattn/npu/fia.h"
#include "ops/npu/fia_sequences.h"

namespace cpattn::fia {

/// Checks which arguments of antiquant are given together, and that they are given if and only if
/// key and value are codes of int8.
void check_antiquant(const FiaArguments& arguments, const Layout& layout);

/// Scales or offsets of key or value.
struct AntiquantNumbers {
  std::vector<float> channels;  // [N, D], or
  std::vector<float> heads;     // [N], or, of each token, in memory of the caller:
  const float* tokens = nullptr;
  TensorView tensor;
  bool by_block = false;     // the first axis is of blocks, not of sequences
  int64_t outer_stride = 0;  // in elements; tokens are neighbours
  int64_t head_stride = 0;

  /// The number of a head in a row of memory, unless there is one for each channel.
  float at(int64_t outer, int64_t token, int64_t head) const {
    if (tokens == nullptr) return heads[head];
    return tokens[outer * outer_stride + token + head * head_stride];
  }
};

/// Int8 codes of key or value, which stand for (code + offset) * scale.
struct AntiquantCache {
  PagedCache codes;
  AntiquantNumbers scale;
  std::optional<AntiquantNumbers> offset;
};

/// Turns codes into numbers. If one factor for each head or token suffices, attention reads the
/// codes themselves. Otherwise (factors of channels, offsets, or factors of the tokens of a
/// sequence whose codes are in blocks) the keys and values of one sequence after the other are
/// written out in the dtype of query, as the operator is defined.
class Antiquant {
 public:
  Antiquant(
      const FiaArguments& arguments,
      const Sequences& sequences,
      PageTable pages,
      const PagedCache& key,
      const PagedCache& value
  );

  /// Sets the scales in `arguments` and returns true if they suffice.
  bool set_scales(AttentionArguments& arguments) const;

  /// Keys and values of one sequence as a page of their own, which `memory` holds.
  struct Expanded {
    PagedCache key, value;
    std::unique_ptr<std::byte[]> memory;
  };
  Expanded expand(int64_t sequence) const;

 private:
  DType dtype_;
  std::vector<int64_t> kv_lens_;
  PageTable pages_;
  AntiquantCache key_, value_;
  bool paged_;
};

}  // namespace cpattn::fia
