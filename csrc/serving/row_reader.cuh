// Columns of rows of read-only tables, read and written by a thread of a GPU.
#pragma once

#include <cstdint>

#include "common/initial_rows.h"
#include "serving/table.h"

namespace torchrec_hkv::serving::cuda {

template <int kBytes>
struct Raw;
template <>
struct Raw<1> {
  using Type = uint8_t;
};
template <>
struct Raw<2> {
  using Type = uint16_t;
};
template <>
struct Raw<4> {
  using Type = uint32_t;
};
template <>
struct Raw<8> {
  using Type = uint2;
};
template <>
struct Raw<16> {
  using Type = uint4;
};

// kColumns columns of a row as they are in memory, from a multiple of kColumns on. They are read
// once, so that they need not stay in the first-level cache.
template <RowFormat kFormat, int kColumns>
struct Piece {
  static constexpr bool kIsQuantized = kFormat == RowFormat::kInt8 || kFormat == RowFormat::kInt4;
  static constexpr int kBits = kFormat == RowFormat::kFloat32 ? 32
                               : kFormat == RowFormat::kInt8  ? 8
                               : kFormat == RowFormat::kInt4  ? 4
                                                              : 16;
  static constexpr int kBytes = kColumns * kBits >= 8 ? kColumns * kBits / 8 : 1;
  typename Raw<kBytes>::Type raw;
  uint32_t header = 0;

  __device__ void load(const char* row, int32_t column) {
    if constexpr (kIsQuantized) {
      header = __ldg(reinterpret_cast<const uint32_t*>(row));
      row += kQuantizedHeaderBytes;
    }
    raw = __ldcs(reinterpret_cast<const typename Raw<kBytes>::Type*>(
        row + (kBits == 4 ? column / 2 : column * kBits / 8)));
  }

  __device__ void widen(float unit, int32_t column, float* values) const {
    const float scale = unit * from_float16(static_cast<uint16_t>(header & 0xffff));
    const float offset = unit * from_float16(static_cast<uint16_t>(header >> 16));
    const auto* bytes = reinterpret_cast<const uint8_t*>(&raw);
#pragma unroll
    for (int k = 0; k < kColumns; ++k) {
      if constexpr (kFormat == RowFormat::kFloat32) {
        values[k] = reinterpret_cast<const float*>(&raw)[k];
      } else if constexpr (kFormat == RowFormat::kFloat16) {
        values[k] = from_float16(reinterpret_cast<const uint16_t*>(&raw)[k]);
      } else if constexpr (kFormat == RowFormat::kBFloat16) {
        values[k] = from_bfloat16(reinterpret_cast<const uint16_t*>(&raw)[k]);
      } else if constexpr (kFormat == RowFormat::kInt8) {
        values[k] = __fadd_rn(offset, __fmul_rn(scale, static_cast<float>(bytes[k])));
      } else {
        const int shift = kColumns == 1 ? (column & 1) * 4 : (k & 1) * 4;
        const auto code = static_cast<float>(bytes[k / 2] >> shift & 15);
        values[k] = __fadd_rn(offset, __fmul_rn(scale, code));
      }
    }
  }
};

// Where the table has no row.
template <int kColumns>
__device__ __noinline__ void unknown_columns(const Table& table, int64_t id, int32_t column,
                                             float* values) {
#pragma unroll
  for (int k = 0; k < kColumns; ++k) {
    values[k] = table.default_row != nullptr
                    ? table.default_row[column + k]
                    : initial_value(table.initial_rows, id, static_cast<uint32_t>(column + k));
  }
}

// Columns of an output; nobody reads them soon.
template <int kColumns>
__device__ void store_columns(RowType type, char* out, const float* values) {
  if (type == RowType::kFloat32) {
    if constexpr (kColumns == 4) {
      __stcs(reinterpret_cast<float4*>(out),
             make_float4(values[0], values[1], values[2], values[3]));
    } else {
      __stcs(reinterpret_cast<float*>(out), values[0]);
    }
    return;
  }
  uint16_t narrow[kColumns];
#pragma unroll
  for (int k = 0; k < kColumns; ++k) {
    narrow[k] = type == RowType::kFloat16 ? to_float16(values[k]) : to_bfloat16(values[k]);
  }
  if constexpr (kColumns == 4) {
    __stcs(reinterpret_cast<uint2*>(out),
           make_uint2(narrow[0] | static_cast<uint32_t>(narrow[1]) << 16,
                      narrow[2] | static_cast<uint32_t>(narrow[3]) << 16));
  } else {
    __stcs(reinterpret_cast<uint16_t*>(out), narrow[0]);
  }
}

}  // namespace torchrec_hkv::serving::cuda
