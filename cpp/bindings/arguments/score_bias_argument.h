// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <vector>

#include "bindings/arguments/arguments.h"
#include "cpattn/attention/score_bias.h"

namespace cpattn::bindings {

/// The bias of a call, kept alive: None, or a tuple of `bias` (one tensor, or a list with one for
/// each sequence), `alibi_slopes` and `relative_bias`; a tuple of `BiasPositions` may follow.
class ScoreBiasArgument {
 public:
  ScoreBiasArgument(const Arguments& read, pybind11::handle score_bias) {
    if (score_bias.is_none()) return;
    const auto parts = pybind11::reinterpret_borrow<pybind11::tuple>(score_bias);
    const auto keep = [&](pybind11::handle tensor, const char* name) -> std::optional<TensorView> {
      if (tensor.is_none()) return std::nullopt;
      return *tensors_.emplace_back(read.tensor(tensor, name));
    };
    if (TensorListArgument::is_list(parts[0])) {
      const TensorListArgument& list = list_.emplace(read, parts[0], "bias");
      value.of_each_sequence = true;
      value.numbers.assign(list.views().begin(), list.views().end());
    } else if (const auto numbers = keep(parts[0], "bias")) {
      value.numbers = {*numbers};
    }
    value.alibi_slopes = keep(parts[1], "alibi_slopes");
    value.relative_bias = keep(parts[2], "relative_bias");
    if (parts.size() == 3) return;
    const auto placed = pybind11::reinterpret_borrow<pybind11::tuple>(parts[3]);
    value.positions = {
        .tokens = *keep(placed[0], "token_positions"),
        .keys = *keep(placed[1], "key_positions"),
        .first_key = read.ints(placed[2], "first_key"),
        .sequences = read.ints(placed[3], "sequences"),
        .first_positions = read.ints(placed[4], "first_positions"),
    };
  }

  ScoreBias value;

 private:
  std::vector<TensorArgument> tensors_;
  std::optional<TensorListArgument> list_;
};

}  // namespace cpattn::bindings
