// SPDX-License-Identifier: Apache-2.0
#pragma once

// Scores of keys that a token does not see. Needs the vector layer included first.
#include "kernels/rows/visibility-inl.h"

namespace cpattn::kernels {
namespace {

/// Sets the scores of the keys among first + begin to first + end that the token does not see to
/// -inf. first + begin is a multiple of kKeyGranule.
inline void hide_keys(
    const TileVisibility& visibility,
    float* scores,
    int64_t token,
    int64_t first,
    int begin,
    int end
) {
  const KeyRange seen = visible_keys(visibility, token);
  const float hidden = -__builtin_inff();
  const int from = static_cast<int>(larger(begin, smaller(end, seen.begin - first)));
  const int to = static_cast<int>(larger(begin, smaller(end, seen.end - first)));
  for (int j = begin; j < from; ++j) scores[j] = hidden;
  for (int j = to; j < end; ++j) scores[j] = hidden;
  if (visibility.mask == nullptr) return;
  for (int j = begin; j < end; j += kLanes) {
    const uint32_t bits = mask_word(visibility, token, first + j / 32 * 32) >> j % 32;
    store(scores + j, select(bits, load(scores + j), splat(hidden)));
  }
}

}  // namespace
}  // namespace cpattn::kernels
