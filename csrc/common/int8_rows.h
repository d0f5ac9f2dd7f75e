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
constexpr uint32_t kInt8Most = 0x7f000000u;   // 2^127: larger values become this

// largest: magnitude_bits of the row's largest value.
HKV_HOST_DEVICE Int8Scale int8_scale(uint32_t largest) {
  if (largest >= 0x7f800000u) return {bits_float(0x7fc00000u), 0.0f};
  if (largest < kInt8Least) return {0.0f, 0.0f};
  if (largest > kInt8Most) largest = kInt8Most;
#ifdef __CUDA_ARCH__
  return {__fdiv_rn(bits_float(largest), 127.0f), __fdiv_rn(127.0f, bits_float(largest))};
#else
  return {bits_float(largest) / 127.0f, 127.0f / bits_float(largest)};
#endif
}

// Shift for stochastic rounding: added to a value before it is rounded to nearest, it makes the
// expected result equal to the value. Whole numbers do not change.
HKV_HOST_DEVICE float int8_shift(uint32_t draw) {
  return (static_cast<float>(draw & 0xffffu) - 32767.5f) * (1.0f / 65536.0f);
}

// 1.5 * 2^23: a float near it ends in the whole number that was added, in two's complement, rounded
// to the nearest.
constexpr float kInt8Magic = 12582912.0f;

// scaled: from -127 to 127; shift: from -1/2 to 1/2.
HKV_HOST_DEVICE int8_t int8_of(float scaled, float shift) {
#ifdef __CUDA_ARCH__
  const float sum = __fadd_rn(__fadd_rn(scaled, shift), kInt8Magic);
#else
  const float sum = scaled + shift + kInt8Magic;
#endif
  return static_cast<int8_t>(float_bits(sum) & 0xffu);
}

// The int8 of a column. inverse: not 0.
HKV_HOST_DEVICE int8_t to_int8(float x, float inverse, float shift) {
#ifdef __CUDA_ARCH__
  const float scaled = __fmul_rn(x, inverse);
#else
  const float scaled = x * inverse;
#endif
  return int8_of(scaled > 127.0f ? 127.0f : scaled < -127.0f ? -127.0f : scaled, shift);
}

}  // namespace torchrec_hkv
