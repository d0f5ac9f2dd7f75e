// A group of neighbouring lanes of a warp that work on one row together.
//
// The tiles of a warp take each step together; a tile with nothing left to do takes part without an
// effect. So the methods are instructions of the whole warp. If their mask were that of the tile,
// the compiler would put code before each of them that finds out which lanes have arrived.
#pragma once

#include <cstdint>

#include "hash_table/cuda/bucket.cuh"
#include "hash_table/cuda/row_vector.cuh"

namespace torchrec_hkv::hash_table::cuda {

// All lanes of the warp call the methods together, except for lane() and first_lane().
template <int kLanes>
struct Tile {
  static constexpr unsigned kFull = kLanes == kWarp ? kAllLanes : (1u << (kLanes % kWarp)) - 1;

  __device__ __forceinline__ static int lane() { return threadIdx.x % kLanes; }
  __device__ __forceinline__ static int first_lane() {
    return threadIdx.x % kWarp / kLanes * kLanes;
  }
  template <typename T>
  __device__ __forceinline__ static T of_lane(T value, int lane) {
    return __shfl_sync(kAllLanes, value, lane, kLanes);
  }
  // Whether a condition, the same for all lanes of a tile, holds for some tile of the warp.
  __device__ __forceinline__ static bool any(bool value) {
    return kLanes == kWarp ? value : __any_sync(kAllLanes, value);
  }
  // The value of the previous lane. The first lane gets its own.
  template <typename T>
  __device__ __forceinline__ static T of_lane_before(T value) {
    return __shfl_up_sync(kAllLanes, value, 1, kLanes);
  }
  // The tile's bits of a ballot of the warp.
  __device__ __forceinline__ static unsigned bits_of(unsigned ballot) {
    return ballot >> first_lane() & kFull;
  }
  // Bit i is the value of lane i.
  __device__ __forceinline__ static unsigned ballot(bool value) {
    return bits_of(__ballot_sync(kAllLanes, value));
  }
  // Combines the values of all lanes.
  template <typename T, typename Combine>
  __device__ __forceinline__ static T reduce(T value, const Combine& combine) {
#pragma unroll
    for (int offset = kLanes / 2; offset; offset /= 2) {
      value = combine(value, __shfl_xor_sync(kAllLanes, value, offset));
    }
    return value;
  }
  __device__ __forceinline__ static float sum(float x) {
    return reduce(x, [](float a, float b) { return a + b; });
  }
  __device__ __forceinline__ static unsigned bits_of_all(unsigned bits) {
    if constexpr (kLanes == kWarp) {
      return __reduce_or_sync(kAllLanes, bits);
    } else {
      return reduce(bits, [](unsigned a, unsigned b) { return a | b; });
    }
  }
  __device__ __forceinline__ static uint32_t largest(uint32_t value) {
    if constexpr (kLanes == kWarp) {
      return __reduce_max_sync(kAllLanes, value);
    } else {
      return reduce(value, [](uint32_t a, uint32_t b) { return max(a, b); });
    }
  }
};

}  // namespace torchrec_hkv::hash_table::cuda
