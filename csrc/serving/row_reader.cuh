// Columns of rows of read-only tables, read and written by a thread of a GPU.
#pragma once

#include <cstdint>

#include "common/initial_rows.h"
#include "serving/table.h"

namespace torchrec_hkv::serving::cuda {

template <int kBytes>
struct RawWord;
template <>
struct RawWord<1> {
  using Type = uint8_t;
};
template <>
struct RawWord<2> {
  using Type = uint16_t;
};
template <>
struct RawWord<4> {
  using Type = uint32_t;
};
template <>
struct RawWord<8> {
  using Type = uint2;
};
template <>
struct RawWord<16> {
  using Type = uint4;
};

// The bytes of kColumns columns of a row, from a multiple of kColumns on. They are read once, so
// they need not stay in the first-level cache.
template <RowFormat kFormat, int kColumns>
struct ColumnBlock {
  static constexpr bool kIsQuantized = kFormat == RowFormat::kInt8 || kFormat == RowFormat::kInt4;
  static constexpr int kBits = kFormat == RowFormat::kFloat32 ? 32
                               : kFormat == RowFormat::kInt8  ? 8
                               : kFormat == RowFormat::kInt4  ? 4
                                                              : 16;
  static constexpr int kBytes = kColumns * kBits >= 8 ? kColumns * kBits / 8 : 1;
  // Quantised rows begin at multiples of 4 bytes.
  static constexpr int kWordBytes = kIsQuantized && kBytes > 4 ? 4 : kBytes;
  using Word = typename RawWord<kWordBytes>::Type;
  Word raw[kBytes / kWordBytes];
  uint32_t header = 0;

  __device__ void load(const char* row, int32_t column) {
    if constexpr (kIsQuantized) {
      header = __ldg(reinterpret_cast<const uint32_t*>(row));
      row += kQuantizedHeaderBytes;
    }
    const auto* from =
        reinterpret_cast<const Word*>(row + (kBits == 4 ? column / 2 : column * kBits / 8));
#pragma unroll
    for (int k = 0; k < kBytes / kWordBytes; ++k) raw[k] = __ldcs(from + k);
  }

  // Writes the columns as they are.
  __device__ void store(char* out) const {
#pragma unroll
    for (int k = 0; k < kBytes / kWordBytes; ++k) {
      __stcs(reinterpret_cast<Word*>(out) + k, raw[k]);
    }
  }

  __device__ void widen(float unit, int32_t column, float* values) const {
    const float scale = unit * from_float16(static_cast<uint16_t>(header & 0xffff));
    const float offset = unit * from_float16(static_cast<uint16_t>(header >> 16));
    const auto* bytes = reinterpret_cast<const uint8_t*>(raw);
#pragma unroll
    for (int k = 0; k < kColumns; ++k) {
      if constexpr (kFormat == RowFormat::kFloat32) {
        values[k] = reinterpret_cast<const float*>(raw)[k];
      } else if constexpr (kFormat == RowFormat::kFloat16) {
        values[k] = from_float16(reinterpret_cast<const uint16_t*>(raw)[k]);
      } else if constexpr (kFormat == RowFormat::kBFloat16) {
        values[k] = from_bfloat16(reinterpret_cast<const uint16_t*>(raw)[k]);
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

// Columns of the initial or default row, for an id that the table lacks.
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

// Like unknown_columns, which takes the address of an array and thus keeps it out of registers.
// This function passes it the address of a copy.
template <int kColumns>
__device__ __forceinline__ void copy_unknown(const Table& table, int64_t id, int32_t column,
                                             float* values) {
  float local_values[kColumns];
  unknown_columns<kColumns>(table, id, column, local_values);
#pragma unroll
  for (int k = 0; k < kColumns; ++k) values[k] = local_values[k];
}

// Stores columns of an output, which are not read soon. kColumns: 1, 4 or 8.
template <int kColumns>
__device__ void store_columns(RowType type, char* out, const float* values) {
  if (type == RowType::kFloat32) {
    if constexpr (kColumns == 1) {
      __stcs(reinterpret_cast<float*>(out), values[0]);
    } else {
#pragma unroll
      for (int k = 0; k < kColumns; k += 4) {
        __stcs(reinterpret_cast<float4*>(out) + k / 4,
               make_float4(values[k], values[k + 1], values[k + 2], values[k + 3]));
      }
    }
    return;
  }
  uint16_t narrow[kColumns];
#pragma unroll
  for (int k = 0; k < kColumns; ++k) {
    narrow[k] = type == RowType::kFloat16 ? to_float16(values[k]) : to_bfloat16(values[k]);
  }
  const auto two = [&](int k) { return narrow[k] | static_cast<uint32_t>(narrow[k + 1]) << 16; };
  if constexpr (kColumns == 8) {
    __stcs(reinterpret_cast<uint4*>(out), make_uint4(two(0), two(2), two(4), two(6)));
  } else if constexpr (kColumns == 4) {
    __stcs(reinterpret_cast<uint2*>(out), make_uint2(two(0), two(2)));
  } else {
    __stcs(reinterpret_cast<uint16_t*>(out), narrow[0]);
  }
}

}  // namespace torchrec_hkv::serving::cuda
