// Columns of a row in registers: four at a time where dim and alignment allow, else one.
#pragma once

#include <cstdint>

#include "common/int8_rows.h"
#include "common/rounding.h"
#include "hash_table/cuda/bucket.cuh"
#include "hash_table/table_view.h"

namespace torchrec_hkv::hash_table::cuda {

__device__ __forceinline__ float widen(RowType type, uint16_t bits) {
  return type == RowType::kFloat16 ? from_float16(bits) : from_bfloat16(bits);
}
__device__ __forceinline__ uint16_t narrow(RowType type, float value) {
  return type == RowType::kFloat16 ? to_float16(value) : to_bfloat16(value);
}
// Two neighbouring columns of 16 bits in one word, the first one in the lower half.
__device__ __forceinline__ float2 widen_pair(RowType type, uint32_t bits) {
  if (type == RowType::kFloat16) {
    return make_float2(from_float16(static_cast<uint16_t>(bits)),
                       from_float16(static_cast<uint16_t>(bits >> 16)));
  }
  return make_float2(__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u));
}
__device__ __forceinline__ uint32_t narrow_pair(RowType type, float first, float second) {
  if (type == RowType::kFloat16) {
    uint32_t pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
    return pair;
  }
  return static_cast<uint32_t>(to_bfloat16(second)) << 16 | to_bfloat16(first);
}

// The same with stochastic rounding.
__device__ __forceinline__ uint32_t narrow_pair_by_chance(RowType type, float first, float second,
                                                          uint32_t first_draw,
                                                          uint32_t second_draw) {
  if (type == RowType::kFloat16) {
    return narrow_pair(type, float16_by_chance(first, first_draw),
                       float16_by_chance(second, second_draw));
  }
  return static_cast<uint32_t>(to_bfloat16_by_chance(second, second_draw)) << 16 |
         to_bfloat16_by_chance(first, first_draw);
}

// Converts one of the four int8 of a word to a float. A conversion has a quarter of the rate of
// these two operations: the byte plus 128 becomes the low bits of the float 2^23, from which 2^23 +
// 128 is subtracted.
__device__ __forceinline__ float int8_to_float(uint32_t word, int byte) {
  return __uint_as_float(__byte_perm(word ^ 0x80808080u, 0x4b000000u, 0x7440 | byte)) - 8388736.0f;
}

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
    if constexpr (kWidth % 4 == 0) {
#pragma unroll
      for (int k = 0; k < kWidth; k += 4) {
        const float4 x = *reinterpret_cast<const float4*>(from + k);
        c.v[k] = x.x, c.v[k + 1] = x.y, c.v[k + 2] = x.z, c.v[k + 3] = x.w;
      }
    } else {
#pragma unroll
      for (int k = 0; k < kWidth; ++k) c.v[k] = from[k];
    }
    return c;
  }
  // kWidth columns of a wider vector, from `first` on.
  template <int kMore>
  __device__ __forceinline__ static Columns part_of(const Columns<kMore>& columns, int first) {
    Columns c;
#pragma unroll
    for (int k = 0; k < kWidth; ++k) c.v[k] = columns.v[first + k];
    return c;
  }
  // Columns of a row of any type but int8, from a multiple of kWidth on.
  __device__ __forceinline__ static Columns load(RowType type, const char* row, int32_t column) {
    if (type == RowType::kFloat32) return load(reinterpret_cast<const float*>(row) + column);
    return load_16_bits(type, row, column);
  }
  // Columns of a row of one of the 16-bit types.
  __device__ __forceinline__ static Columns load_16_bits(RowType type, const char* row,
                                                         int32_t column) {
    Columns c;
    const uint16_t* from = reinterpret_cast<const uint16_t*>(row) + column;
    if constexpr (kWidth == 8) {
      const uint4 x = *reinterpret_cast<const uint4*>(from);
      const uint32_t words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const float2 pair = widen_pair(type, words[k]);
        c.v[2 * k] = pair.x, c.v[2 * k + 1] = pair.y;
      }
    } else if constexpr (kWidth == 4) {
      const ushort4 x = *reinterpret_cast<const ushort4*>(from);
      c.v[0] = widen(type, x.x), c.v[1] = widen(type, x.y);
      c.v[2] = widen(type, x.z), c.v[3] = widen(type, x.w);
    } else {
#pragma unroll
      for (int k = 0; k < kWidth; ++k) c.v[k] = widen(type, from[k]);
    }
    return c;
  }
  // Columns of 8 bits. If kWidth is at most four, `from` is a multiple of kWidth.
  __device__ __forceinline__ static Columns load_int8(const char* from, float scale) {
    Columns c;
    if constexpr (kWidth % 4 == 0) {
#pragma unroll
      for (int k = 0; k < kWidth; k += 4) {
        const auto word = *reinterpret_cast<const uint32_t*>(from + k);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          c.v[k + i] = __fmul_rn(scale, int8_to_float(word, i));
        }
      }
    } else {
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        c.v[k] = __fmul_rn(scale, static_cast<float>(reinterpret_cast<const int8_t*>(from)[k]));
      }
    }
    return c;
  }
  // As load, also for rows of 8 bits.
  __device__ __forceinline__ static Columns load_any(RowType type, const char* row,
                                                     int32_t column) {
    if (type != RowType::kInt8) return load(type, row, column);
    return load_int8(row + kInt8Start + column, *reinterpret_cast<const float*>(row));
  }
  __device__ __forceinline__ void store(RowType type, char* row, int32_t column) const {
    if (type == RowType::kFloat32) {
      store(reinterpret_cast<float*>(row) + column);
      return;
    }
    uint16_t* to = reinterpret_cast<uint16_t*>(row) + column;
    if constexpr (kWidth == 8) {
      *reinterpret_cast<uint4*>(to) =
          make_uint4(narrow_pair(type, v[0], v[1]), narrow_pair(type, v[2], v[3]),
                     narrow_pair(type, v[4], v[5]), narrow_pair(type, v[6], v[7]));
    } else if constexpr (kWidth == 4) {
      *reinterpret_cast<ushort4*>(to) = make_ushort4(narrow(type, v[0]), narrow(type, v[1]),
                                                     narrow(type, v[2]), narrow(type, v[3]));
    } else {
#pragma unroll
      for (int k = 0; k < kWidth; ++k) to[k] = narrow(type, v[k]);
    }
  }
  __device__ __forceinline__ void store(float* to) const {
    if constexpr (kWidth % 4 == 0) {
#pragma unroll
      for (int k = 0; k < kWidth; k += 4) {
        *reinterpret_cast<float4*>(to + k) = make_float4(v[k], v[k + 1], v[k + 2], v[k + 3]);
      }
    } else {
#pragma unroll
      for (int k = 0; k < kWidth; ++k) to[k] = v[k];
    }
  }
  __device__ __forceinline__ static Columns initial(const InitialRows& init, int64_t id,
                                                    int32_t column) {
    Columns c;
    if (kWidth % 4 == 0 && column % 4 == 0) {  // whole blocks of the generator
      const bool uniform = init.distribution == Distribution::kUniform;
#pragma unroll
      for (int block = 0; block < kWidth / 4; ++block) {
        const InitialBits bits =
            block_bits(id_bits(init, id), (static_cast<uint32_t>(column) >> 2) + block);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const uint32_t draw = draw_of(bits, k);
          c.v[4 * block + k] = uniform ? scale_uniform(init, draw) : scale_normal(init, draw);
        }
      }
      return c;
    }
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

// Whether rows of this width, and outputs at this position, can be accessed four columns at a time.
__device__ __forceinline__ bool four_wide(int32_t dim, int64_t place) {
  return ((dim | static_cast<int32_t>(place & 3)) & 3) == 0;
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int offset = 16; offset; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
  return x;
}

}  // namespace torchrec_hkv::hash_table::cuda
