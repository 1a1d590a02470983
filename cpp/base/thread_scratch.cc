// SPDX-License-Identifier: Apache-2.0
#include <cstddef>
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

#include "base/nested_calls.h"
#include "cpattn/base/parallel.h"

namespace cpattn {
namespace {

/// A buffer that only grows.
class Scratch {
 public:
  Scratch() = default;
  ~Scratch() { std::free(data_); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  void* get(std::size_t bytes) {
    if (bytes_ < bytes) {
      std::free(data_);
      data_ = nullptr;
      bytes_ = 0;
      const std::size_t rounded = (bytes + 63) / 64 * 64;
      data_ = std::aligned_alloc(64, rounded);
      if (data_ == nullptr) throw std::bad_alloc();
      bytes_ = rounded;
    }
    return data_;
  }

 private:
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
};

/// The scratch of calls that are not nested, and of those that are, by their depth.
thread_local Scratch outer_scratch;
thread_local std::vector<std::unique_ptr<Scratch>> nested_scratch;

thread_local int call_depth = 0;

}  // namespace

NestedCalls::NestedCalls() { ++call_depth; }

/// Nested calls are rare: what they used is not kept.
NestedCalls::~NestedCalls() {
  --call_depth;
  if (nested_scratch.size() > static_cast<std::size_t>(call_depth))
    nested_scratch.resize(call_depth);
}

void* thread_scratch(std::size_t bytes) {
  if (call_depth == 0) return outer_scratch.get(bytes);
  while (nested_scratch.size() < static_cast<std::size_t>(call_depth)) {
    nested_scratch.push_back(std::make_unique<Scratch>());
  }
  return nested_scratch[call_depth - 1]->get(bytes);
}

}  // namespace cpattn
