// SPDX-License-Identifier: Apache-2.0
#include <cstddef>
#include <cstdlib>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "base/nested_calls.h"
#include "cpattn/base/check.h"
#include "cpattn/base/parallel.h"

namespace cpattn {
namespace {

/// A thread keeps at most this much between calls. Kernels of attention need a few megabytes; a
/// top-k of millions needs hundreds, once.
constexpr std::size_t kKeptBytes = std::size_t{16} << 20;

class NoScratch final : public std::bad_alloc {
 public:
  NoScratch(const char* function, std::size_t bytes)
      : text_(concat(function, ": no memory for ", bytes, " bytes of a thread's scratch")) {}
  const char* what() const noexcept override { return text_.c_str(); }

 private:
  std::string text_;
};

/// A buffer that grows on request.
class Scratch {
 public:
  Scratch() = default;
  ~Scratch() { std::free(data_); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  void* get(const char* function, std::size_t bytes) {
    if (bytes_ < bytes) {
      free();
      const std::size_t rounded = (bytes + 63) / 64 * 64;
      data_ = std::aligned_alloc(64, rounded);
      if (data_ == nullptr) throw NoScratch(function, bytes);
      bytes_ = rounded;
    }
    return data_;
  }

  void shrink() {
    if (bytes_ > kKeptBytes) free();
  }

 private:
  void free() {
    std::free(data_);
    data_ = nullptr;
    bytes_ = 0;
  }

  void* data_ = nullptr;
  std::size_t bytes_ = 0;
};

/// The scratch of outer calls, and of nested calls by their depth.
thread_local Scratch outer_scratch;
thread_local std::vector<std::unique_ptr<Scratch>> nested_scratch;

thread_local int call_depth = 0;
thread_local int scratch_uses = 0;

}  // namespace

NestedCalls::NestedCalls() { ++call_depth; }

/// Nested calls are rare: their scratch is not kept.
NestedCalls::~NestedCalls() {
  --call_depth;
  if (nested_scratch.size() > static_cast<std::size_t>(call_depth))
    nested_scratch.resize(call_depth);
}

ScratchUse::ScratchUse() { ++scratch_uses; }

ScratchUse::~ScratchUse() {
  if (--scratch_uses == 0) outer_scratch.shrink();
}

void* thread_scratch(const char* function, std::size_t bytes) {
  if (call_depth == 0) return outer_scratch.get(function, bytes);
  while (nested_scratch.size() < static_cast<std::size_t>(call_depth)) {
    nested_scratch.push_back(std::make_unique<Scratch>());
  }
  return nested_scratch[call_depth - 1]->get(function, bytes);
}

}  // namespace cpattn
