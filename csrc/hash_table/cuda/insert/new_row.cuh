// Writes a new row on the GPU, by a tile of eight lanes.
#pragma once

#include <cstdint>

#include "hash_table/cuda/bucket.cuh"
#include "hash_table/cuda/int8_row.cuh"
#include "hash_table/cuda/row_vector.cuh"

namespace torchrec_hkv::hash_table::cuda {

constexpr int kTile = 8;  // lanes that write one row

template <int kWidth>
__device__ __forceinline__ void write_initial_row(const TableView& table, int64_t id, char* row,
                                                  int lane) {
  for (int32_t c = lane * kWidth; c < table.dim(); c += kTile * kWidth) {
    Columns<kWidth>::initial(table.initial_rows, id, table.column_offset + c)
        .store(table.rows.type, row, c);
  }
}

// Uniform rows have a path of their own, because the code of the normal distribution needs more
// registers.
__device__ __forceinline__ void write_uniform_row(const TableView& table, uint64_t of_id, char* row,
                                                  int lane) {
  const InitialRows& init = table.initial_rows;
  if ((table.dim() | table.column_offset) % 4 == 0) {
    for (int32_t c = lane * 4; c < table.dim(); c += kTile * 4) {
      const InitialBits bits =
          block_bits(of_id, static_cast<uint32_t>(table.column_offset + c) >> 2);
      Columns<4> columns;
#pragma unroll
      for (int k = 0; k < 4; ++k) columns.v[k] = scale_uniform(init, draw_of(bits, k));
      columns.store(table.rows.type, row, c);
    }
  } else {
    for (int32_t c = lane; c < table.dim(); c += kTile) {
      const auto column = static_cast<uint32_t>(table.column_offset + c);
      Columns<1> value;
      value.v[0] = scale_uniform(init, draw_of(block_bits(of_id, column >> 2), column));
      value.store(table.rows.type, row, c);
    }
  }
}

// Copies a row by the lanes of a tile. bytes: a multiple of two.
__device__ __forceinline__ void copy_row(char* to, const char* from, int64_t bytes, int lane) {
  if (bytes % 16 == 0) {
    for (int64_t b = lane * 16; b < bytes; b += kTile * 16) {
      *reinterpret_cast<uint4*>(to + b) = *reinterpret_cast<const uint4*>(from + b);
    }
  } else {
    for (int64_t b = lane * 2; b < bytes; b += kTile * 2) {
      *reinterpret_cast<uint16_t*>(to + b) = *reinterpret_cast<const uint16_t*>(from + b);
    }
  }
}

__device__ __forceinline__ int64_t row_bytes(const TableView& table) { return table.rows.bytes(); }

// What the lanes need to write an id's row: for uniform rows the mixed bits, which one lane
// computes for all; otherwise the id.
template <NewRows kRows>
__device__ __forceinline__ uint64_t row_source(const TableView& table, int64_t id) {
  return kRows == NewRows::kUniform ? id_bits(table.initial_rows, id) : static_cast<uint64_t>(id);
}

// Writes the row and a zero state of an id that has got a slot. source: row_source of the id.
// frame: of the slot, or kNoFrame.
template <NewRows kRows>
__device__ __forceinline__ void write_new_row(const TableView& table, uint64_t source, int64_t slot,
                                              int64_t frame, int lane) {
  const auto id = static_cast<int64_t>(source);
  char* row = table.rows.at(slot, frame);
  if (kRows == NewRows::kUniform) write_uniform_row(table, source, row, lane);
  if (kRows == NewRows::kInitialAny && table.rows.type == RowType::kInt8) {
    write_int8_row<kTile>(row, table.dim(), lane, [&](int32_t c) {
      return initial_value(table.initial_rows, id, static_cast<uint32_t>(c));
    });
  } else if (kRows == NewRows::kInitial || kRows == NewRows::kInitialAny) {
    if ((table.dim() | table.column_offset) % 4 == 0) {
      write_initial_row<4>(table, id, row, lane);
    } else {
      write_initial_row<1>(table, id, row, lane);
    }
  }
  if (table.states.width == 0) return;
  float* state = reinterpret_cast<float*>(table.states.at(slot, frame));
  for (int32_t c = lane; c < table.states.width; c += kTile) state[c] = 0.0f;
}

}  // namespace torchrec_hkv::hash_table::cuda
