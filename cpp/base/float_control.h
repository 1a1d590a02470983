// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace cpattn {

/// The control bits of the calling thread's floating-point unit: how it rounds and treats subnormal
/// numbers.
inline uint64_t float_control() {
#if defined(__x86_64__)
  constexpr unsigned kFlags = 0x3f;  // exceptions raised so far
  return _mm_getcsr() & ~kFlags;
#elif defined(__aarch64__)
  uint64_t control;
  asm volatile("mrs %0, fpcr" : "=r"(control));
  return control;
#else
  return 0;
#endif
}

inline void set_float_control([[maybe_unused]] uint64_t control) {
#if defined(__x86_64__)
  _mm_setcsr(static_cast<unsigned>(control));
#elif defined(__aarch64__)
  asm volatile("msr fpcr, %0" : : "r"(control));
#endif
}

/// While alive, the calling thread has these control bits.
class FloatControlScope {
 public:
  explicit FloatControlScope(uint64_t control) : before_(float_control()), control_(control) {
    if (control_ != before_) set_float_control(control_);
  }
  ~FloatControlScope() {
    if (control_ != before_) set_float_control(before_);
  }
  FloatControlScope(const FloatControlScope&) = delete;
  FloatControlScope& operator=(const FloatControlScope&) = delete;

 private:
  uint64_t before_, control_;
};

}  // namespace cpattn
