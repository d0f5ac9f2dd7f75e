// Columns of a row in registers: four at a time where dim and alignment allow, else one.
#pragma once

#include <cstdint>

#include "hash_table/table_view.h"

namespace torchrec_hkv::hash_table::cuda {

template <int kWidth>
struct Columns {
  float v[kWidth];

  __device__ __forceinline__ static Columns zero() {
    Columns c;
#pragma unroll
    for (int k = 0; k < kWidth; ++k) c.v[k] = 0.0f;
    return c;
  }
  __device__ __forceinline__ static Columns load(const float* from) {
    Columns c;
    if constexpr (kWidth == 4) {
      const float4 x = *reinterpret_cast<const float4*>(from);
      c.v[0] = x.x, c.v[1] = x.y, c.v[2] = x.z, c.v[3] = x.w;
    } else {
#pragma unroll
      for (int k = 0; k < kWidth; ++k) c.v[k] = from[k];
    }
    return c;
  }
  __device__ __forceinline__ void store(float* to) const {
    if constexpr (kWidth == 4) {
      *reinterpret_cast<float4*>(to) = make_float4(v[0], v[1], v[2], v[3]);
    } else {
#pragma unroll
      for (int k = 0; k < kWidth; ++k) to[k] = v[k];
    }
  }
  __device__ __forceinline__ static Columns initial(const InitialRows& init, int64_t id,
                                                    int32_t column) {
    Columns c;
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      c.v[k] = initial_value(init, id, static_cast<uint32_t>(column + k));
    }
    return c;
  }
  __device__ __forceinline__ void add(float scale, const Columns& other) {
#pragma unroll
    for (int k = 0; k < kWidth; ++k) v[k] += scale * other.v[k];
  }
  __device__ __forceinline__ float dot(const Columns& other) const {
    float sum = 0.0f;
#pragma unroll
    for (int k = 0; k < kWidth; ++k) sum += v[k] * other.v[k];
    return sum;
  }
};

// Whether rows of this width and outputs at this column can be read four floats at a time.
__device__ __forceinline__ bool four_wide(int32_t dim, int32_t column, int64_t stride) {
  return ((dim | column | static_cast<int32_t>(stride & 3)) & 3) == 0;
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int offset = 16; offset; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
  return x;
}

}  // namespace torchrec_hkv::hash_table::cuda
