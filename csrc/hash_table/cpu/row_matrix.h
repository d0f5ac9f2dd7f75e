// Copies rows between tables and matrices, on the CPU.
#pragma once

#include <cstdint>
#include <cstring>

#include "common/elements_cpu.h"
#include "hash_table/row_matrix.h"

namespace torchrec_hkv::hash_table::cpu {

// Copies `width` elements, converted if the types differ. One of the types is float32 then.
inline void copy_elements(RowType to_type, char* to, RowType from_type, const char* from,
                          int32_t width) {
  if (to_type == from_type) {
    std::memcpy(to, from, row_size(to_type, width));
    return;
  }
  // Rows of a matrix have the type of their table, or are floats.
  if (from_type == RowType::kFloat32) {
    narrow_row(to_type, reinterpret_cast<const float*>(from), width, to);
  } else {
    widen_row(from_type, from, 0, width, reinterpret_cast<float*>(to));
  }
}

// Clears the columns of a matrix's row beyond the table's.
inline void clear_columns_from(const RowMatrix& matrix, int64_t row, int32_t width) {
  const int64_t element = element_size(matrix.type);
  std::memset(matrix.at(row) + width * element, 0, (matrix.columns - width) * element);
}

// Copies a vector of `width` elements from a table to row `row`.
inline void copy_to_matrix(const RowMatrix& matrix, int64_t row, RowType type, const char* from,
                           int32_t width) {
  copy_elements(matrix.type, matrix.at(row), type, from, width);
  clear_columns_from(matrix, row, width);
}

}  // namespace torchrec_hkv::hash_table::cpu
