// Element types of rows. Arithmetic is in float; narrower rows are widened when read and rounded
// when written, 16-bit ones to the nearest, ties to even. Only tables store rows of 8 bits:
// outputs, gradients, and rows that calls take or return have another type.
#pragma once

#include <cstdint>
#include <cstring>

#include "common/macros.h"

namespace torchrec_hkv {

enum class RowType : int32_t { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2, kInt8 = 3 };

// Bytes of an element.
HKV_HOST_DEVICE int32_t element_size(RowType type) {
  return type == RowType::kFloat32 ? 4 : type == RowType::kInt8 ? 1 : 2;
}

// A row of 8 bits is a float32 scale, an int8 for each column, and zeros up to a multiple of four
// bytes. A column's value is the scale times its int8 (common/int8_rows.h).
constexpr int32_t kInt8Start = 4;  // where the columns begin

// Bytes of a row of so many columns.
HKV_HOST_DEVICE int64_t row_size(RowType type, int64_t columns) {
  return type == RowType::kInt8 ? kInt8Start + (columns + 3) / 4 * 4 : columns * element_size(type);
}

HKV_HOST_DEVICE uint32_t float_bits(float x) {
#ifdef __CUDA_ARCH__
  return __float_as_uint(x);
#else
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
#endif
}

HKV_HOST_DEVICE float bits_float(uint32_t bits) {
#ifdef __CUDA_ARCH__
  return __uint_as_float(bits);
#else
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
#endif
}

HKV_HOST_DEVICE float from_bfloat16(uint16_t x) {
  return bits_float(static_cast<uint32_t>(x) << 16);
}

HKV_HOST_DEVICE uint16_t to_bfloat16(float x) {
  const uint32_t bits = float_bits(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>(bits >> 16 | 0x40);  // NaN
  return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

HKV_HOST_DEVICE float from_float16(uint16_t x) {
#ifdef __CUDA_ARCH__
  // As __half2float, whose header takes half a second of each file's compilation.
  float wide;
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(x));
  return wide;
#else
  _Float16 half;
  std::memcpy(&half, &x, sizeof(half));
  return static_cast<float>(half);
#endif
}

HKV_HOST_DEVICE uint16_t to_float16(float x) {
#ifdef __CUDA_ARCH__
  uint16_t half;  // as __float2half_rn
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(x));
  return half;
#else
  const _Float16 half = static_cast<_Float16>(x);
  uint16_t bits;
  std::memcpy(&bits, &half, sizeof(bits));
  return bits;
#endif
}

// Element i of a row.
HKV_HOST_DEVICE float load_element(RowType type, const char* row, int64_t i) {
  switch (type) {
    case RowType::kFloat16:
      return from_float16(reinterpret_cast<const uint16_t*>(row)[i]);
    case RowType::kBFloat16:
      return from_bfloat16(reinterpret_cast<const uint16_t*>(row)[i]);
    case RowType::kInt8:
      return *reinterpret_cast<const float*>(row) *
             static_cast<float>(reinterpret_cast<const int8_t*>(row)[kInt8Start + i]);
    default:
      return reinterpret_cast<const float*>(row)[i];
  }
}

// Not for rows of 8 bits, whose elements share a scale.
HKV_HOST_DEVICE void store_element(RowType type, char* row, int64_t i, float value) {
  switch (type) {
    case RowType::kFloat16:
      reinterpret_cast<uint16_t*>(row)[i] = to_float16(value);
      break;
    case RowType::kBFloat16:
      reinterpret_cast<uint16_t*>(row)[i] = to_bfloat16(value);
      break;
    default:
      reinterpret_cast<float*>(row)[i] = value;
  }
}

}  // namespace torchrec_hkv
