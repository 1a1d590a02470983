// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace cpattn {

/// The purpose of a forward pass, with the names and values of the serving engine's own
/// enumeration.
enum class ForwardMode : uint8_t {
  extend = 1,
  decode,
  mixed,
  idle,
  target_verify,
  draft_extend_v2,
  prebuilt,
  split_prefill,
  dllm_extend
};

// The predicates below have the names and members of the engine's own.

constexpr bool is_extend(ForwardMode mode, bool include_draft_extend_v2 = false) {
  return mode == ForwardMode::extend || mode == ForwardMode::mixed ||
         mode == ForwardMode::target_verify || mode == ForwardMode::split_prefill ||
         mode == ForwardMode::dllm_extend ||
         (include_draft_extend_v2 && mode == ForwardMode::draft_extend_v2);
}

/// The modes whose new tokens context parallelism may split.
constexpr bool is_context_parallel_extend(ForwardMode mode, bool include_draft_extend_v2 = false) {
  return mode == ForwardMode::extend || mode == ForwardMode::mixed ||
         (include_draft_extend_v2 && mode == ForwardMode::draft_extend_v2);
}

constexpr bool is_extend_without_speculative(ForwardMode mode) {
  return mode == ForwardMode::extend || mode == ForwardMode::mixed ||
         mode == ForwardMode::split_prefill || mode == ForwardMode::dllm_extend;
}

constexpr bool is_extend_or_draft_extend_or_mixed(ForwardMode mode) {
  return mode == ForwardMode::extend || mode == ForwardMode::mixed ||
         mode == ForwardMode::split_prefill;
}

constexpr bool is_decode_or_idle(ForwardMode mode) {
  return mode == ForwardMode::decode || mode == ForwardMode::idle;
}

constexpr bool is_cpu_graph(ForwardMode mode) { return mode == ForwardMode::decode; }

constexpr bool is_cuda_graph(ForwardMode mode) {
  return mode == ForwardMode::decode || mode == ForwardMode::idle ||
         mode == ForwardMode::target_verify || mode == ForwardMode::dllm_extend;
}

}  // namespace cpattn
