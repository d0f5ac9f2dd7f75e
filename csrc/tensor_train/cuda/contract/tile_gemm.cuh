// The product of a tile in shared memory: prefixes = heads x middle.
#pragma once

#include "tensor_train/cuda/contract/tensor_core.cuh"
#include "tensor_train/cuda/contract/tile_config.cuh"

namespace torchrec_hkv::tensor_train::cuda {

// prefixes[kRows][kColumns] = heads[kRows][kRank] middle[kRank][kColumns].
//
// Of eight ranks, the even ranks are the first four of the depth of a product and the odd ranks the
// other four, and a lane's columns of kVector products are neighbours. So a fragment of the heads
// is one load of matrices, fragments of the middle and stored results are vectors, and loads have
// no bank conflicts. Computes `count` prefixes; results of others are not used.
template <typename Config>
__device__ __forceinline__ void multiply_prefixes(int thread, const BlockTask<Config>& task,
                                                  const float* heads, const float* middle,
                                                  float* prefixes, int count) {
  constexpr int kProducts = Config::kProducts;
  constexpr int kRowTiles = Config::kRows / 16;
  constexpr int kRowGroups = kRowTiles >= 4 && Config::kWarps >= 8 ? 2 : 1;
  constexpr int kMine = kRowTiles / kRowGroups;
  constexpr int kMyColumns = Config::kColumns / (Config::kWarps / kRowGroups) / 8;
  static_assert(kMyColumns >= 1 && kMine >= 1);
  // Without split operands, vectors would have to be moved to adjacent registers.
  constexpr int kVector = kProducts == 1 ? 1 : kMyColumns < 4 ? kMyColumns : 4;
  static_assert(kMyColumns % kVector == 0);
  const int warp = thread / 32 / kRowGroups;
  const int first = thread / 32 % kRowGroups * kMine;
  const int lane = thread % 32, row = lane / 4, column = lane % 4;
  if (kRowGroups > 1 && first * 4 >= count) return;
  const float* const head_values =
      heads + (first * 16 + lane % 16) * Config::kHeadStep + lane / 16 * 4;
  const float* const middle_values =
      middle + 2 * column * Config::kMiddleStep + warp * kMyColumns * 8 + kVector * row;
  float sums[kMine][kMyColumns][4] = {};
  const int depth = task.head_depth();
#pragma unroll 4
  for (int k = 0; k < depth; k += 8) {
    Operand<kProducts> b[kMyColumns][2];
#pragma unroll
    for (int j = 0; j < kMyColumns; j += kVector) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float values[kVector];
        load_neighbours(middle_values + (k + half) * Config::kMiddleStep + 8 * j, values);
#pragma unroll
        for (int v = 0; v < kVector; ++v) b[j + v][half] = operand<kProducts>(values[v]);
      }
    }
#pragma unroll
    for (int m = 0; m < kMine; ++m) {
      float a[4];
      load_matrices(head_values + m * 16 * Config::kHeadStep + k, a);
      const auto a0 = operand<kProducts>(a[0]), a1 = operand<kProducts>(a[1]);
      const auto a2 = operand<kProducts>(a[2]), a3 = operand<kProducts>(a[3]);
#pragma unroll
      for (int j = 0; j < kMyColumns; ++j) {
        multiply_add(sums[m][j], a0, a1, a2, a3, b[j][0], b[j][1]);
      }
    }
  }
#pragma unroll
  for (int m = 0; m < kMine; ++m) {
#pragma unroll
    for (int j = 0; j < kMyColumns; j += kVector) {
      const int at = (warp * kMyColumns + j) * 8 + 2 * kVector * column;
      float* const to = prefixes + ((first + m) * 16 + row) * Config::kRowStep +
                        at / Config::kSlice * Config::kColumnStep + at % Config::kSlice;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float values[2 * kVector];  // neighbouring columns
#pragma unroll
        for (int v = 0; v < kVector; ++v) {
          values[v] = prepared<kProducts>(sums[m][j + v][2 * half]);
          values[kVector + v] = prepared<kProducts>(sums[m][j + v][2 * half + 1]);
        }
        float* const line = to + half * 8 * Config::kRowStep;
        if constexpr (kVector == 1) {
          *reinterpret_cast<float2*>(line) = make_float2(values[0], values[1]);
        } else {
#pragma unroll
          for (int v = 0; v < 2 * kVector; v += 4) {
            *reinterpret_cast<float4*>(line + v) =
                make_float4(values[v], values[v + 1], values[v + 2], values[v + 3]);
          }
        }
      }
    }
  }
}

}  // namespace torchrec_hkv::tensor_train::cuda
