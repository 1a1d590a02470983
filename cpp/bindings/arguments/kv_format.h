// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>

#include "bindings/arguments/arguments.h"
#include "cpattn/attention/paged_attention.h"

namespace cpattn::bindings {

/// The kind of codes that kv_dtype names; null for None.
std::optional<DType> parse_kv_dtype(const Arguments& read, pybind11::handle kv_dtype);

/// A cache, whose bytes may be codes of the kind that kv_dtype names.
TensorView as_codes(
    const Arguments& read,
    const char* name,
    const TensorView& given,
    const std::optional<DType>& kv_dtype
);

/// A scale of a cache: None, a number or a tensor of them, which it keeps alive.
class ScaleArgument {
 public:
  ScaleArgument(
      const Arguments& read,
      pybind11::handle scale,
      const char* name,
      KVAxisOrder layout,
      int64_t page_size,
      int64_t num_kv_heads
  );

  KVScale value;

 private:
  std::optional<TensorArgument> tensor_;
};

}  // namespace cpattn::bindings
