// Copies rows between tables and matrices on the GPU, by a tile of lanes.
#pragma once

#include <cstdint>

#include "hash_table/cuda/int8_row.cuh"
#include "hash_table/row_matrix.h"

namespace torchrec_hkv::hash_table::cuda {

// Copies `width` elements, and converts them if the types differ. vectors: whether both addresses
// and the length are multiples of 16 bytes. Called by all lanes of the tile.
template <int kLanes>
__device__ __forceinline__ void copy_elements(RowType to_type, char* to, RowType from_type,
                                              const char* from, int32_t width, bool vectors,
                                              int lane) {
  if (to_type == RowType::kInt8) {
    write_int8_row<kLanes>(to, width, lane,
                           [&](int32_t c) { return load_element(from_type, from, c); });
    return;
  }
  if (to_type != from_type) {
    for (int32_t c = lane; c < width; c += kLanes) {
      store_element(to_type, to, c, load_element(from_type, from, c));
    }
    return;
  }
  const int32_t bytes = width * element_size(to_type);
  if (vectors) {
    for (int32_t b = lane * 16; b < bytes; b += kLanes * 16) {
      *reinterpret_cast<uint4*>(to + b) = *reinterpret_cast<const uint4*>(from + b);
    }
  } else {
    for (int32_t b = lane * 2; b < bytes; b += kLanes * 2) {
      *reinterpret_cast<uint16_t*>(to + b) = *reinterpret_cast<const uint16_t*>(from + b);
    }
  }
}

// Whether rows of a matrix and vectors of a table can be copied 16 bytes at a time.
__device__ __forceinline__ bool in_vectors(const RowMatrix& matrix, RowType type, int32_t width) {
  const auto address = static_cast<int64_t>(reinterpret_cast<uintptr_t>(matrix.data.get()));
  return matrix.type == type && (width * element_size(type) | matrix.bytes() | address) % 16 == 0;
}

// Copies a vector of a table to a row, with zeros in the columns beyond the table's.
template <int kLanes>
__device__ __forceinline__ void copy_to_matrix(const RowMatrix& matrix, int64_t row, RowType type,
                                               const char* from, int32_t width, int lane) {
  char* const to = matrix.at(row);
  copy_elements<kLanes>(matrix.type, to, type, from, width, in_vectors(matrix, type, width), lane);
  for (int32_t c = width + lane; c < matrix.columns; c += kLanes) {
    store_element(matrix.type, to, c, 0.0f);
  }
}

// Copies the first columns of a row to a vector of a table.
template <int kLanes>
__device__ __forceinline__ void copy_from_matrix(const RowMatrix& matrix, int64_t row, RowType type,
                                                 char* to, int32_t width, int lane) {
  copy_elements<kLanes>(type, to, matrix.type, matrix.at(row), width,
                        in_vectors(matrix, type, width), lane);
}

}  // namespace torchrec_hkv::hash_table::cuda
