// Computes the gradients of the middle and the heads from the gradients of a tile's prefixes in
// shared memory.
#pragma once

#include "tensor_train/cuda/contract/tensor_core.cuh"
#include "tensor_train/cuda/contract/tile_config.cuh"

namespace torchrec_hkv::tensor_train::cuda {

// A part of the gradient of a middle slice, [kRank][kColumns] = heads^T grads, in registers of a
// block: kTiles tiles of 16 rows from row first_row on. Rows are ranks in the order of heads in
// shared memory. A lane has two neighbouring rows of a tile and kColumnTiles neighbouring columns.
template <typename Config>
struct MiddleGrad {
  static constexpr int kColumnTiles = Config::kColumns / Config::kWarps / 8;  // tiles per warp
  static constexpr int kAllTiles = Config::kRank / 16;
  static constexpr int kTiles = kAllTiles * kColumnTiles <= 16 ? kAllTiles : 16 / kColumnTiles;
  static constexpr int kVector = kColumnTiles < 4 ? kColumnTiles : 4;
  static_assert(kColumnTiles >= 1 && kAllTiles % kTiles == 0);
  static_assert(kColumnTiles % kVector == 0);
  float sums[kTiles][kColumnTiles][4];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
#pragma unroll
      for (int j = 0; j < kColumnTiles; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[m][j][i] = 0.0f;
      }
    }
  }

  // Adds the gradients of `count` prefixes.
  __device__ __forceinline__ void add(int thread, int first_row, const float* heads,
                                      const float* grads, int count) {
    constexpr int kProducts = Config::kProducts;
    const int warp = thread / 32, row = thread % 32 / 4, column = thread % 4;
    const int depth = (count + 1) / 2 * 8;  // rows of absent prefixes are 0
    // k = column is row 2 column, and k = column + 4 is the next row, to avoid bank conflicts.
    const float* const head_values = heads + 2 * column * Config::kHeadStep + first_row + 2 * row;
    const float* grad_values[kColumnTiles / kVector];
#pragma unroll
    for (int j = 0; j < kColumnTiles / kVector; ++j) {
      const int at = (warp * kColumnTiles + j * kVector) * 8 + kVector * row;
      grad_values[j] = grads + 2 * column * Config::kRowStep +
                       at / Config::kSlice * Config::kColumnStep + at % Config::kSlice;
    }
#pragma unroll 2
    for (int k = 0; k < depth; k += 8) {
      Operand<kProducts> b[kColumnTiles][2];
#pragma unroll
      for (int j = 0; j < kColumnTiles; j += kVector) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float values[kVector];
          load_neighbours(grad_values[j / kVector] + (k + half) * Config::kRowStep, values);
#pragma unroll
          for (int v = 0; v < kVector; ++v) b[j + v][half] = operand<kProducts>(values[v]);
        }
      }
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
        float even[2], odd[2];  // rows 2 column and 2 column + 1
        load_neighbours(head_values + k * Config::kHeadStep + m * 16, even);
        load_neighbours(head_values + (k + 1) * Config::kHeadStep + m * 16, odd);
        const auto a0 = operand<kProducts>(even[0]), a1 = operand<kProducts>(even[1]);
        const auto a2 = operand<kProducts>(odd[0]), a3 = operand<kProducts>(odd[1]);
#pragma unroll
        for (int j = 0; j < kColumnTiles; ++j) {
          multiply_add(sums[m][j], a0, a1, a2, a3, b[j][0], b[j][1]);
        }
      }
    }
  }

  // Adds the registers to the gradient in memory.
  __device__ __forceinline__ void flush(int thread, const BlockTask<Config>& task, int slice,
                                        int first_row) const {
    const int32_t last_r = task.last_r(), middle_q = task.middle_q();
    const int warp = thread / 32, row = thread % 32 / 4, column = thread % 4;
#pragma unroll
    for (int j = 0; j < kColumnTiles; j += kVector) {
      const int at = (warp * kColumnTiles + j) * 8 + 2 * kVector * column;
      const int middle_column = at / Config::kSlice;
      const int r = slice * Config::kSlice + at % Config::kSlice;
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int head = first_row + m * 16 + row / 4 * 8 + row % 4 / 2 + row % 2 * 4 + 2 * half;
          const size_t line = (static_cast<size_t>(task.middle) * task.head_r() + head) * middle_q +
                              task.middle_column() + middle_column;
          const bool exists =
              task.has_middle(middle_column) && (Config::kKnownRanks || head < task.head_r());
          float* const to = task.table->middle_grad + line * last_r + r;
          const int remaining = exists ? last_r - r : 0;
          const int i = 2 * half;
          const auto& tile_sums = sums[m];
          if constexpr (kVector == 1) {
            add_to_two<Config>(task, kMiddlePart, to, tile_sums[j][i], tile_sums[j][i + 1],
                               remaining);
          } else if constexpr (kVector == 2) {
            add_to_four<Config>(task, kMiddlePart, to,
                                make_float4(tile_sums[j][i], tile_sums[j + 1][i],
                                            tile_sums[j][i + 1], tile_sums[j + 1][i + 1]),
                                remaining);
          } else {
            add_to_four<Config>(task, kMiddlePart, to,
                                make_float4(tile_sums[j][i], tile_sums[j + 1][i],
                                            tile_sums[j + 2][i], tile_sums[j + 3][i]),
                                remaining);
            add_to_four<Config>(task, kMiddlePart, to + 4,
                                make_float4(tile_sums[j][i + 1], tile_sums[j + 1][i + 1],
                                            tile_sums[j + 2][i + 1], tile_sums[j + 3][i + 1]),
                                remaining - 4);
          }
        }
      }
    }
  }
};

template <typename Config>
__device__ __forceinline__ void add_middle_grad(int thread, const BlockTask<Config>& task,
                                                int slice, const float* heads, const float* grads,
                                                int count) {
  using Grad = MiddleGrad<Config>;
#pragma unroll 1
  for (int first_row = 0; first_row < task.head_r(); first_row += 16 * Grad::kTiles) {
    Grad grad;
    grad.clear();
    grad.add(thread, first_row, heads, grads, count);
    grad.flush(thread, task, slice, first_row);
  }
}

// head_grad rows [kRows][kRank] += grads[kRows][kColumns] middle^T, for `count` prefixes. kChains:
// number of independent sums of a value, and so of products that don't depend on each other.
template <typename Config, int kChains = 1>
__device__ __forceinline__ void add_head_grad(int thread, const BlockTask<Config>& task,
                                              const int4* prefixes, int count, const float* middle,
                                              const float* grads) {
  constexpr int kProducts = Config::kProducts;
  constexpr int kRowTiles = Config::kRows / 16;
  constexpr int kSharing = Config::kWarps / kRowTiles;  // warps per row tile
  constexpr int kMine = Config::kRank / 8 / kSharing;   // column tiles
  static_assert(Config::kWarps % kRowTiles == 0 && kMine >= 1);
  const TableCuda& table = *task.table;
  const int32_t head_r = task.head_r();
  const int warp = thread / 32, row = thread % 32 / 4, column = thread % 4;
  const int row_tile = warp % kRowTiles;
  const int first = warp / kRowTiles * kMine;
  if (row_tile * 4 >= count || first * 8 >= head_r) return;
  float chains[kChains][kMine][4] = {};
  const int lane = thread % 32;
  const float* const grad_values =
      grads + (row_tile * 16 + lane % 16) * Config::kRowStep + lane / 16 * 4;
  const float* const middle_values =
      middle + (first * 8 + lane % 8) * Config::kMiddleStep + lane / 8 * 4;
#pragma unroll 1
  for (int middle_column = 0; middle_column < 4; ++middle_column) {
    if (!task.has_middle(middle_column)) break;
#pragma unroll 2
    for (int k = 0; k < Config::kSlice; k += 16) {
      float a[2][4];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        load_matrices(grad_values + middle_column * Config::kColumnStep + k + 8 * half, a[half]);
      }
#pragma unroll
      for (int j = 0; j < kMine; ++j) {
        float b[4];
        load_matrices(
            middle_values + j * 8 * Config::kMiddleStep + middle_column * Config::kSlice + k, b);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          multiply_add(chains[(k / 8 + half) % kChains][j], operand<kProducts>(a[half][0]),
                       operand<kProducts>(a[half][1]), operand<kProducts>(a[half][2]),
                       operand<kProducts>(a[half][3]), operand<kProducts>(b[2 * half]),
                       operand<kProducts>(b[2 * half + 1]));
        }
      }
    }
  }
  float (&sums)[kMine][4] = chains[0];
#pragma unroll
  for (int c = 1; c < kChains; ++c) {
#pragma unroll
    for (int j = 0; j < kMine; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[j][i] += chains[c][j][i];
    }
  }
  const int prefix = row_tile * 4 + row / 4;
  const int head_column = task.head_column() + row % 4;
  const bool exists = task.has_head(row % 4);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (prefix + 2 * half >= count) continue;
    const size_t line =
        static_cast<size_t>(prefixes[prefix + 2 * half].w) * task.head_q() + head_column;
#pragma unroll
    for (int j = 0; j < kMine; ++j) {
      const int r = (first + j) * 8 + 2 * column;
      add_to_two<Config>(task, kHeadPart, table.head_grad + line * head_r + r, sums[j][2 * half],
                         sums[j][2 * half + 1], exists ? head_r - r : 0);
    }
  }
}

}  // namespace torchrec_hkv::tensor_train::cuda
