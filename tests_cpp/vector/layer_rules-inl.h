// SPDX-License-Identifier: Apache-2.0
#pragma once

// What contract-inl.h promises of every function, tried. Needs a vector layer included first.
// C headers only: files compiled for one instruction set may emit no inline function of others.
#include <stdint.h>

#include "kernels/vector/contract-inl.h"

namespace cpattn::kernels {
namespace {

constexpr float kNan = __builtin_nanf("");
constexpr float kInfinity = __builtin_inff();

struct Lanes {
  float at[kLanes];
  explicit Lanes(Vector x) { store(at, x); }
};

template <class Function>
Vector made(Function function) {
  float lanes[kLanes];
  for (int i = 0; i < kLanes; ++i) lanes[i] = function(i);
  return load(lanes);
}

/// Whether every lane of x is function(its number); NaN is NaN.
template <class Function>
bool holds(Vector x, Function function) {
  const Lanes lanes(x);
  for (int i = 0; i < kLanes; ++i) {
    const float wanted = function(i);
    if (lanes.at[i] != wanted && (lanes.at[i] == lanes.at[i] || wanted == wanted)) return false;
  }
  return true;
}

/// A number in every lane, such that sums and products are exact.
inline float small(int lane) { return static_cast<float>((lane * 7 + 3) % 16); }
inline Vector smalls() { return made(small); }

/// p[0 .. kLanes) at an address that is a multiple of sizeof(T) and no more.
template <class T>
struct Unaligned {
  alignas(64) T cells[kLanes + 2] = {};
  T* p = cells + 1;
};

template <class T>
bool stores_what_it_loads(uint32_t num_codes, bool (*skip)(uint32_t code)) {
  for (uint32_t code = 0; code < num_codes; ++code) {
    if (skip(code)) continue;
    Unaligned<T> from;
    for (int i = 0; i < kLanes; ++i) from.p[i].bits = static_cast<decltype(T::bits)>(code);
    Unaligned<T> to;
    store(to.p, load(from.p));
    if (__builtin_memcmp(to.cells, from.cells, sizeof to.cells) != 0) return false;
  }
  return true;
}

/// Whether numbers half way between those of neighbouring codes without a sign become the even
/// one, and those beside the middle the nearer one.
template <class T>
bool rounds_to_even(uint32_t first, uint32_t last) {
  const auto value = [](uint32_t code) {
    Unaligned<T> from;
    from.p[0].bits = static_cast<decltype(T::bits)>(code);
    return Lanes(load(from.p)).at[0];
  };
  const auto code_of = [](float x) {
    Unaligned<T> to;
    store(to.p, splat(x));
    return uint32_t{to.p[0].bits};
  };
  for (uint32_t code = first; code < last; ++code) {
    const float middle = value(code) / 2 + value(code + 1) / 2;
    if (code_of(middle) != code + code % 2) return false;
    if (code_of(middle * (1 - 0x1p-20F)) != code) return false;
    if (code_of(middle * (1 + 0x1p-20F)) != code + 1) return false;
  }
  return true;
}

inline bool no_code(uint32_t /*code*/) { return false; }
inline bool nan_of_float16(uint32_t code) { return (code & 0x7fff) > 0x7c00; }
inline bool nan_of_bfloat16(uint32_t code) { return (code & 0x7fff) > 0x7f80; }
inline bool nan_of_float8(uint32_t code) { return (code & 0x7f) == 0x7f; }
inline bool nan_of_float8_e5m2(uint32_t code) { return (code & 0x7f) > 0x7c; }

template <class T>
bool stores_nan_and_overflow(float beyond, uint32_t infinity, bool (*is_nan)(uint32_t)) {
  Unaligned<T> to;
  store(to.p, splat(beyond));
  if (to.p[kLanes - 1].bits != infinity) return false;
  store(to.p, splat(kNan));
  return is_nan(to.p[0].bits);
}

inline bool loads_and_stores_16_bits() {
  return stores_what_it_loads<Half>(1U << 16, &nan_of_float16) &&
         stores_what_it_loads<Bfloat16>(1U << 16, &nan_of_bfloat16) &&
         rounds_to_even<Half>(0, 0x7bfe) && rounds_to_even<Bfloat16>(0x0080, 0x7f7e) &&
         stores_nan_and_overflow<Half>(65520.0F, 0x7c00, &nan_of_float16) &&
         stores_nan_and_overflow<Bfloat16>(0x1.fffffep127F, 0x7f80, &nan_of_bfloat16);
}

inline float float8_value(uint32_t code) {
  if (nan_of_float8(code)) return kNan;
  const int exponent = static_cast<int>(code >> 3 & 15);
  const auto fraction = static_cast<float>((code & 7) + (exponent == 0 ? 0 : 8));
  const float size = __builtin_ldexpf(fraction, (exponent == 0 ? 1 : exponent) - 10);
  return (code & 0x80) != 0 ? -size : size;
}

inline float float8_e5m2_value(uint32_t code) {
  if (nan_of_float8_e5m2(code)) return kNan;
  const int exponent = static_cast<int>(code >> 2 & 31);
  const auto fraction = static_cast<float>((code & 3) + (exponent == 0 ? 0 : 4));
  const float size =
      exponent == 31 ? kInfinity : __builtin_ldexpf(fraction, (exponent == 0 ? 1 : exponent) - 17);
  return (code & 0x80) != 0 ? -size : size;
}

inline bool loads_and_stores_e5m2() {
  for (uint32_t code = 0; code < 256; ++code) {
    Unaligned<Float8E5M2> from;
    for (int i = 0; i < kLanes; ++i) from.p[i].bits = static_cast<uint8_t>(code + i);
    if (!holds(load(from.p), [=](int i) { return float8_e5m2_value((code + i) & 0xff); })) {
      return false;
    }
  }
  return stores_what_it_loads<Float8E5M2>(1U << 8, &nan_of_float8_e5m2) &&
         rounds_to_even<Float8E5M2>(0, 0x7b) &&
         stores_nan_and_overflow<Float8E5M2>(61440.0F, 0x7c, &nan_of_float8_e5m2) &&
         stores_nan_and_overflow<Float8E5M2>(-0x1.fffffep127F, 0xfc, &nan_of_float8_e5m2) &&
         stores_nan_and_overflow<Float8E5M2>(61439.0F, 0x7b, &nan_of_float8_e5m2);
}

inline bool loads_and_stores_codes() {
  for (uint32_t code = 0; code < 256; ++code) {
    Unaligned<Float8> from;
    Unaligned<int8_t> number, back;
    for (int i = 0; i < kLanes; ++i) {
      from.p[i].bits = static_cast<uint8_t>(code + i);
      number.p[i] = static_cast<int8_t>(code + i);
    }
    if (!holds(load(from.p), [=](int i) { return float8_value((code + i) & 0xff); })) return false;
    if (!holds(load(number.p), [=](int i) { return static_cast<int8_t>(code + i); })) return false;
    store(back.p, load(number.p));
    if (__builtin_memcmp(back.cells, number.cells, sizeof back.cells) != 0) return false;
  }
  Unaligned<int8_t> halves;
  store(halves.p, made([](int i) { return static_cast<float>(i) - 1.5F; }));
  for (int i = 0; i < kLanes; ++i) {
    if (halves.p[i] != (i < 2 ? 2 * i - 2 : i % 2 == 0 ? i - 2 : i - 1)) return false;
  }
  Unaligned<Float8> nan;
  store(nan.p, splat(-480.0F));
  return nan_of_float8(nan.p[0].bits) && rounds_to_even<Float8>(0, 0x7e) &&
         stores_what_it_loads<Float8>(1U << 8, &nan_of_float8);
}

inline bool expands_codes() {
  const float scales[] = {1.0F, 0.3F, kNan};
  for (const float scale : scales) {
    for (int first = 0; first < 256; first += kCodes) {
      Float8 codes[kCodes];
      for (int i = 0; i < kCodes; ++i) codes[i].bits = static_cast<uint8_t>(first + i);
      Bfloat16 exact[kCodes], scaled[kCodes];
      expand(codes, exact);
      expand(codes, splat(scale), scaled);
      for (int i = 0; i < kCodes; ++i) {
        const float value = float8_value(static_cast<uint32_t>(first + i));
        const float product = value * scale;
        Bfloat16 wanted[kLanes], wanted_scaled[kLanes];
        store(wanted, splat(value));
        store(wanted_scaled, splat(product));
        const auto same = [](Bfloat16 a, Bfloat16 b, bool nan) {
          return nan ? nan_of_bfloat16(a.bits) : a.bits == b.bits;
        };
        if (!same(exact[i], wanted[0], value != value)) return false;
        if (!same(scaled[i], wanted_scaled[0], product != product)) return false;
      }
    }
  }
  return true;
}

inline bool does_arithmetic() {
  const Vector x = smalls();
  const Vector three = splat(3.0F);
  const Vector nan = splat(kNan);
  const auto is_nan = [](Vector y) { return holds(y, [](int) { return kNan; }); };
  Unaligned<float> copy;
  store(copy.p, x);
  return holds(x, small) && holds(load(copy.p), small) && copy.cells[0] == 0 &&
         copy.cells[kLanes + 1] == 0 && holds(three, [](int) { return 3.0F; }) &&
         holds(add(x, three), [](int i) { return small(i) + 3; }) &&
         holds(sub(x, three), [](int i) { return small(i) - 3; }) &&
         holds(mul(x, three), [](int i) { return small(i) * 3; }) &&
         holds(div(x, three), [](int i) { return small(i) / 3; }) &&
         holds(fma(x, three, x), [](int i) { return small(i) * 4; }) && is_nan(add(nan, x)) &&
         is_nan(sub(x, nan)) && is_nan(mul(nan, splat(0.0F))) && is_nan(div(nan, x)) &&
         is_nan(fma(nan, x, x)) && is_nan(fma(splat(kInfinity), splat(0.0F), x)) &&
         is_nan(max(x, nan)) && is_nan(min(x, nan)) &&
         holds(max(x, splat(8.0F)), [](int i) { return small(i) > 8 ? small(i) : 8; }) &&
         holds(min(x, splat(8.0F)), [](int i) { return small(i) < 8 ? small(i) : 8; });
}

inline bool reduces() {
  float sum = 0;
  float largest = 0;
  for (int i = 0; i < kLanes; ++i) {
    sum += small(i);
    largest = small(i) > largest ? small(i) : largest;
  }
  if (reduce_add(smalls()) != sum || reduce_max(smalls()) != largest) return false;
  for (int one = 0; one < kLanes; ++one) {
    const auto poison = [=](int i) { return i == one ? kNan : 0.0F; };
    const auto top = [=](int i) { return i == one ? -1.0F : -2.0F; };
    const float total = reduce_add(made(poison));
    if (total == total || reduce_max(made(top)) != -1) return false;
  }
  return true;
}

inline bool scales_by_powers() {
  for (int step = 0; step <= 1154; ++step) {  // from -300 to 126.98
    const float x = -300 + static_cast<float>(step) * 0.37F;
    Vector rest;
    const Vector exponent = split_exponent(splat(x), rest);
    const float left = Lanes(rest).at[0];
    const float scaled = Lanes(scale_by_power(splat(1.5F), exponent)).at[0];
    const float wanted = x < kLeastExponent ? 0.0F : 1.5F * __builtin_exp2f(x - left);
    const float allowed = wanted * 0x1p-20F;
    const bool in_unit = left >= 0 && left <= 1;
    const bool close = scaled - wanted <= allowed && wanted - scaled <= allowed;
    if (!close || (!in_unit && x >= kLeastExponent)) return false;
  }
  Vector rest;
  const Vector lowest = split_exponent(splat(-kInfinity), rest);
  if (!holds(scale_by_power(splat(1.0F), lowest), [](int) { return 0.0F; })) return false;
  if (holds(rest, [](int) { return kNan; })) return false;
  const Vector none = split_exponent(splat(kNan), rest);
  return holds(rest, [](int) { return kNan; }) &&
         holds(scale_by_power(rest, none), [](int) { return kNan; });
}

template <int kDistance = 1>
bool exchanges() {
  if constexpr (kDistance < kLanes) {
    return holds(exchange<kDistance>(smalls()), [](int i) { return small(i ^ kDistance); }) &&
           exchanges<2 * kDistance>();
  }
  return true;
}

inline bool moves_lanes() {
  for (uint32_t mask = 0; mask < 1U << kLanes; ++mask) {
    const auto chosen = [=](int i) { return (mask >> i & 1) != 0 ? small(i) : -1.0F; };
    if (!holds(select(mask, smalls(), splat(-1.0F)), chosen)) return false;
    if (!holds(select(mask | ~0U << kLanes, smalls(), splat(-1.0F)), chosen)) return false;
  }
  Vector rows[kLanes];
  for (int row = 0; row < kLanes; ++row) {
    rows[row] = made([=](int i) { return static_cast<float>(row * 100 + i); });
  }
  const float quad[5] = {0, 1, 2, 3, 4};
  if (!holds(load_quad(quad + 1), [](int i) { return static_cast<float>(1 + i % 4); }))
    return false;
  const Vector sums = sums_of_quads(rows[0], rows[1], rows[2], rows[3]);
  if (!holds(sums, [](int i) {
        return static_cast<float>(100 * 4 * (i % 4) + 4 * (i - i % 4) + 6);
      })) {
    return false;
  }
  transpose(rows);
  for (int row = 0; row < kLanes; ++row) {
    if (!holds(rows[row], [=](int i) { return static_cast<float>(i * 100 + row); })) return false;
  }
  return exchanges();
}

inline bool compares() {
  const Vector x = made([](int i) { return i % 3 == 2 ? kNan : small(i); });
  const Vector pivot = splat(small(1));
  uint32_t above = 0, not_below = 0;
  int32_t ones[kLanes], counts[kLanes];
  for (int i = 0; i < kLanes; ++i) {
    above |= uint32_t{i % 3 != 2 && small(i) > small(1)} << i;
    not_below |= uint32_t{i % 3 != 2 && small(i) >= small(1)} << i;
    ones[i] = 1;
  }
  store(counts, count_greater(load(ones), x, pivot));
  for (int i = 0; i < kLanes; ++i) {
    if (counts[i] != 1 + static_cast<int32_t>(above >> i & 1)) return false;
  }
  return greater(x, pivot) == above && greater_equal(x, pivot) == not_below &&
         greater(pivot, splat(kNan)) == 0 && greater_equal(splat(kNan), splat(kNan)) == 0 &&
         holds(without_nan(x), [](int i) { return i % 3 == 2 ? -kInfinity : small(i); });
}

inline bool compresses() {
  if (reduce_add(ascending(5)) != kLanes * (kLanes + 9) / 2) return false;
  for (uint32_t mask = 0; mask < 1U << kLanes; ++mask) {
    float floats[kLanes + 1];
    int32_t integers[kLanes + 1];
    floats[kLanes] = 77;
    integers[kLanes] = 77;
    store_compressed(floats, mask, smalls());
    store_compressed(integers, mask, ascending(5));
    if (floats[kLanes] != 77 || integers[kLanes] != 77) return false;
    for (int i = 0, n = 0; i < kLanes; ++i) {
      if ((mask >> i & 1) == 0) continue;
      if (floats[n] != small(i) || integers[n] != 5 + i) return false;
      ++n;
    }
  }
  return true;
}

/// The rule that the layer breaks; null if it keeps all.
inline const char* broken_rule() {
  [[maybe_unused]] const VectorLayer every_function;
  return !does_arithmetic()            ? "arithmetic"
         : !reduces()                  ? "sums and largest of lanes"
         : !loads_and_stores_16_bits() ? "numbers of 16 bits"
         : !scales_by_powers()         ? "powers of two"
         : !moves_lanes()              ? "lanes moved"
         : !loads_and_stores_codes()   ? "codes of 8 bits"
         : !loads_and_stores_e5m2()    ? "codes of e5m2"
         : !expands_codes()            ? "codes as bfloat16"
         : !compares()                 ? "comparisons"
         : !compresses()               ? "compression"
                                       : nullptr;
}

}  // namespace
}  // namespace cpattn::kernels
