// One warp computes the gradient products of four distinct ids of a prefix: the gradient of the
// prefix from the rows' gradients and the last core, and the gradients of the last core from the
// rows' gradients and the prefix.
#pragma once

#include "tensor_train/cuda/contract/tensor_core.cuh"

namespace torchrec_hkv::tensor_train::cuda {

__device__ __forceinline__ float part(const float4& v, int i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

// Adds four distinct ids to the gradient of a prefix, 16 rows (head column, middle column) of 32
// ranks; depth is (id, last column). low, high: gradients of their rows; lasts: their slices, four
// ranks of a last column. more_columns: whether there are more than two last columns.
template <int kProducts>
__device__ __forceinline__ void add_prefix_grad(float (&sums)[4][4], const float4& low,
                                                const float4& high, const float4 (&lasts)[4],
                                                bool more_columns = true) {
#pragma unroll
  for (int s = 0; s < 2; ++s) {
    if (s > 0 && !more_columns) break;
    const auto a0 = rounded_operand<kProducts>(part(low, 2 * s));
    const auto a1 = rounded_operand<kProducts>(part(high, 2 * s));
    const auto a2 = rounded_operand<kProducts>(part(low, 2 * s + 1));
    const auto a3 = rounded_operand<kProducts>(part(high, 2 * s + 1));
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      multiply_add(sums[j], a0, a1, a2, a3, rounded_operand<kProducts>(part(lasts[2 * s], j)),
                   rounded_operand<kProducts>(part(lasts[2 * s + 1], j)));
    }
  }
}

// Replaces the prefix in shared memory by its gradient.
template <typename Config>
__device__ __forceinline__ void store_prefix_grad(const float (&sums)[4][4], float* prefix) {
  const int row = threadIdx.x % 32 / 4, column = threadIdx.x % 4;
  float* to = prefix + row / 4 * Config::kRowStep + row % 4 * Config::kColumnStep + 8 * column;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      *reinterpret_cast<float4*>(to + half * 2 * Config::kRowStep + 4 * i) =
          prepared<Config::kProducts>(make_float4(sums[0][2 * half + i], sums[1][2 * half + i],
                                                  sums[2][2 * half + i], sums[3][2 * half + i]));
    }
  }
}

// Reads columns of a prefix for the product that gives gradients of the last core. In their order,
// the four lanes of a row have 16 neighbouring columns at a time, which are whole sectors of
// memory.
template <typename Config>
__device__ __forceinline__ void read_columns(const float* prefix, float4 (&values)[4]) {
  const int row = threadIdx.x % 32 / 4, column = threadIdx.x % 4;
  const float* const from = prefix + column * Config::kColumnStep + row / 2 * 4 + row % 2 * 16;
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    values[e] = *reinterpret_cast<const float4*>(from + e * Config::kRowStep);
  }
}

// Computes the gradients of four distinct ids' slices of the last core, rows (id, last column),
// from columns of the prefix; depth is (head column, middle column). other: gradients of the ids'
// rows.
template <int kProducts>
__device__ __forceinline__ void last_grad_of(float (&d)[4][4], const float2 (&other)[4],
                                             const float4 (&values)[4]) {
#pragma unroll
  for (int s = 0; s < 2; ++s) {
    const auto a0 = rounded_operand<kProducts>(other[2 * s].x);
    const auto a1 = rounded_operand<kProducts>(other[2 * s].y);
    const auto a2 = rounded_operand<kProducts>(other[2 * s + 1].x);
    const auto a3 = rounded_operand<kProducts>(other[2 * s + 1].y);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      multiply_add(d[j], a0, a1, a2, a3, operand<kProducts>(part(values[2 * s], j)),
                   operand<kProducts>(part(values[2 * s + 1], j)));
    }
  }
}

}  // namespace torchrec_hkv::tensor_train::cuda
