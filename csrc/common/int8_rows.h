// Rows of 8 bits: a scale, and an int8 for each column. The scale is a 127th of the row's largest
// magnitude. Arithmetic is one operation at a time, so that both devices agree bit for bit. If a
// row has an infinite value or NaN, its scale is NaN, so that all of it reads as NaN.
#pragma once

#include <cstdint>

#include "common/dtypes.h"
#include "common/macros.h"
#include "common/rounding.h"

namespace torchrec_hkv {

// The magnitude of a value as an integer with the same order; infinity and NaN come last.
HKV_HOST_DEVICE uint32_t magnitude_bits(float x) { return float_bits(x) & 0x7fffffffu; }

struct Int8Scale {
  float scale;
  float inverse;  // factor of values before they are rounded; 0: all are stored as 0
};

constexpr uint32_t kInt8Least = 0x0d800000u;  // 2^-100: rows of smaller values become zeros
constexpr uint32_t kInt8Most = 0x7f000000u;   // 2^127: rows of larger values shrink to this

// largest: magnitude_bits of the row's largest value.
HKV_HOST_DEVICE Int8Scale int8_scale(uint32_t largest) {
  if (largest >= 0x7f800000u) return {bits_float(0x7fc00000u), 0.0f};
  if (largest < kInt8Least) return {0.0f, 0.0f};
  const float value = bits_float(largest);
  const float stored = bits_float(largest > kInt8Most ? kInt8Most : largest);
#ifdef __CUDA_ARCH__
  // Divides by 127: the product with the reciprocal and one correction give the exactly rounded
  // quotient (Markstein, "Computation of elementary functions on the IBM RISC System/6000", 1990).
  constexpr float kReciprocal = 1.0f / 127.0f;
  const float near = __fmul_rn(stored, kReciprocal);
  return {__fmaf_rn(__fmaf_rn(-near, 127.0f, stored), kReciprocal, near), __fdiv_rn(127.0f, value)};
#else
  return {stored / 127.0f, 127.0f / value};
#endif
}

// 1.5 * 2^23: the low bits of its sum with a small number are that number in two's complement,
// rounded to the nearest.
constexpr float kInt8Magic = 12582912.0f;
// 1.5 * 2^8: the low bits of its sum with a number within 128 are that number plus 128, with 15
// bits after the point.
constexpr float kInt8ChanceMagic = 384.0f;

// The bits of x * inverse + magic. inverse: not 0.
HKV_HOST_DEVICE uint32_t int8_sum(float x, float inverse, float magic) {
#ifdef __CUDA_ARCH__
  return float_bits(__fadd_rn(__fmul_rn(x, inverse), magic));
#else
  return float_bits(x * inverse + magic);
#endif
}

// The int8 of a column, rounded to nearest.
HKV_HOST_DEVICE int8_t to_int8(float x, float inverse) {
  return static_cast<int8_t>(int8_sum(x, inverse, kInt8Magic) & 0xffu);
}

// Rounds a column stochastically: the third byte is its int8 with an inverted sign bit. The 16 bits
// of the draw are added to those after the point, so that the expected result is the value, and
// whole numbers do not change.
HKV_HOST_DEVICE uint32_t int8_by_chance(float x, float inverse, uint32_t draw) {
  return (int8_sum(x, inverse, kInt8ChanceMagic) << 1) + (draw & 0xffffu);
}
constexpr uint32_t kInt8Signs = 0x80808080u;  // of four columns

}  // namespace torchrec_hkv
