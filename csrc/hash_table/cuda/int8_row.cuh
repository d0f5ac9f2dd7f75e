// Rows of 8 bits on the GPU, by a tile of lanes. A row is written as a whole, because its scale
// depends on all of its values.
#pragma once

#include <cstdint>

#include "common/int8_rows.h"
#include "common/rounding.h"
#include "hash_table/cuda/bucket.cuh"

namespace torchrec_hkv::hash_table::cuda {

// magnitude_bits of the largest of the tile's values.
template <int kLanes>
__device__ __forceinline__ uint32_t largest_of_tile(uint32_t largest) {
  constexpr unsigned kFull = kLanes == kWarp ? kAllLanes : (1u << (kLanes % kWarp)) - 1;
  return __reduce_max_sync(kFull << threadIdx.x % kWarp / kLanes * kLanes, largest);
}

__device__ __forceinline__ uint32_t pack_int8(const int8_t (&values)[4]) {
  const auto word = [&](int k) { return static_cast<uint32_t>(values[k]); };
  return __byte_perm(__byte_perm(word(0), word(1), 0x0040), __byte_perm(word(2), word(3), 0x0040),
                     0x5410);
}

// Four columns, rounded to int8 at random. inverse: of the row's scale, not 0. bits: rounding_bits
// of the columns.
__device__ __forceinline__ uint32_t pack_int8_by_chance(const float (&values)[4], float inverse,
                                                        uint64_t bits) {
  uint32_t sums[4];
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const auto half = static_cast<uint32_t>(bits >> (k < 2 ? 0 : 32));
    sums[k] = int8_by_chance(values[k], inverse, k % 2 == 0 ? half : half >> 16);
  }
  return __byte_perm(__byte_perm(sums[0], sums[1], 0x62), __byte_perm(sums[2], sums[3], 0x62),
                     0x5410) ^
         kInt8Signs;
}

// Column c of a row of this scale.
__device__ __forceinline__ float int8_value(const char* row, float scale, int32_t c) {
  return __fmul_rn(scale, static_cast<float>(reinterpret_cast<const int8_t*>(row)[kInt8Start + c]));
}

// Writes a row and rounds each value to nearest. value(c): of column c, called twice. It may read
// the lane's columns of the previous row, but not its scale. Returns the scale. Called by all lanes
// of the tile.
template <int kLanes, typename Value>
__device__ __forceinline__ float write_int8_row(char* row, int32_t dim, int lane,
                                                const Value& value) {
  uint32_t largest = 0;
  for (int32_t first = lane * 4; first < dim; first += kLanes * 4) {
    for (int32_t c = first; c < min(first + 4, dim); ++c) {
      largest = max(largest, magnitude_bits(value(c)));
    }
  }
  const Int8Scale scale = int8_scale(largest_of_tile<kLanes>(largest));
  for (int32_t first = lane * 4; first < dim; first += kLanes * 4) {
    int8_t columns[4] = {};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if (first + k < dim && scale.inverse != 0.0f) {
        columns[k] = to_int8(value(first + k), scale.inverse);
      }
    }
    *reinterpret_cast<uint32_t*>(row + kInt8Start + first) = pack_int8(columns);
  }
  if (lane == 0) *reinterpret_cast<float*>(row) = scale.scale;
  return scale.scale;
}

}  // namespace torchrec_hkv::hash_table::cuda
