// Converts rows of any type to rows of floats and back, on the CPU.
#pragma once

#include <cstdint>

#include "common/int8_rows_cpu.h"
#include "common/vectors_cpu.h"

namespace torchrec_hkv {

// to[c] = from[c] for n elements, of any type but 8 bits. From 16 bits to float this is exact.
inline void widen_elements(RowType type, const char* from, int32_t n, float* __restrict__ to) {
  with_type(type, [&]<RowType kType>() {
    for_vectors(n, [&]<typename Vector, int kVectors>(int32_t c) {
      for (int v = 0; v < kVectors; ++v) {
        const int32_t at = c + v * kColumnsOf<Vector>;
        Vector columns;
        load_columns<kType>(from + at * element_size(kType), columns);
        store_columns<RowType::kFloat32>(columns, reinterpret_cast<char*>(to + at));
      }
    });
  });
}

// Converts n columns of a stored row of any type, from `column` on.
inline void widen_row(RowType type, const char* row, int32_t column, int32_t n,
                      float* __restrict__ to) {
  if (type == RowType::kInt8) return widen_int8(row, column, n, to);
  widen_elements(type, row + column * element_size(type), n, to);
}

// The inverse of widen_elements; rounds to the nearest, ties to even.
inline void narrow_elements(RowType type, const float* __restrict__ from, int32_t n, char* to) {
  with_type(type, [&]<RowType kType>() {
    for_vectors(n, [&]<typename Vector, int kVectors>(int32_t c) {
      for (int v = 0; v < kVectors; ++v) {
        const int32_t at = c + v * kColumnsOf<Vector>;
        Vector columns;
        load_columns<RowType::kFloat32>(reinterpret_cast<const char*>(from + at), columns);
        store_columns<kType>(columns, to + at * element_size(kType));
      }
    });
  });
}

// Converts floats to a stored row of any type, rounded to the nearest.
inline void narrow_row(RowType type, const float* __restrict__ from, int32_t n, char* row) {
  if (type == RowType::kInt8) return narrow_int8(from, n, row);
  narrow_elements(type, from, n, row);
}

}  // namespace torchrec_hkv
