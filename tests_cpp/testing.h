// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include "cpattn/base/isa.h"
#include "cpattn/base/tensor_view.h"

namespace cpattn::testing {

/// A contiguous row-major view of a vector.
template <class T>
TensorView view(std::vector<T>& values, DType dtype, std::initializer_list<int64_t> shape) {
  TensorView tensor{.data = values.data(), .dtype = dtype, .writable = true};
  for (int64_t size : shape) tensor.shape[tensor.rank++] = size;
  int64_t stride = 1;
  for (int axis = tensor.rank - 1; axis >= 0; --axis) {
    tensor.strides[axis] = stride;
    stride *= tensor.shape[axis];
  }
  return tensor;
}

inline std::vector<float> random_floats(int64_t count, uint32_t seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (float& value : values) value = normal(generator);
  return values;
}

/// What a call throws for its arguments, or "no error".
template <class F>
std::string message_of(F call) {
  try {
    call();
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "no error";
}

/// Whether `call` takes or makes a number below the normal floats on this thread, which stops the
/// pipeline of many processors each time. False where the processor does not tell.
template <class F>
bool meets_subnormals(F call) {
#if defined(__x86_64__)
  constexpr unsigned kDenormal = 0x02, kUnderflow = 0x10;
  _mm_setcsr(_mm_getcsr() & ~(kDenormal | kUnderflow));
  call();
  return (_mm_getcsr() & (kDenormal | kUnderflow)) != 0;
#else
  call();
  return false;
#endif
}

/// Runs a test once per instruction set of this machine; restores it after.
class EveryIsa : public ::testing::TestWithParam<Isa> {
 protected:
  void SetUp() override { set_isa(isa_name(GetParam())); }
  void TearDown() override { set_isa(isa_name(before_)); }

 private:
  Isa before_ = active_isa();
};

inline std::string isa_test_name(const ::testing::TestParamInfo<Isa>& info) {
  std::string name(isa_name(info.param));
  std::replace(name.begin(), name.end(), '-', '_');  // GoogleTest allows no other sign
  return name;
}

}  // namespace cpattn::testing
