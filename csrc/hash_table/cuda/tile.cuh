// A group of neighbouring lanes of a warp that work on one row together.
#pragma once

#include <cstdint>

#include "hash_table/cuda/bucket.cuh"
#include "hash_table/cuda/row_vector.cuh"

namespace torchrec_hkv::hash_table::cuda {

template <int kLanes>
struct Tile {
  static constexpr unsigned kFull = kLanes == kWarp ? kAllLanes : (1u << (kLanes % kWarp)) - 1;

  __device__ __forceinline__ static int lane() { return threadIdx.x % kLanes; }
  __device__ __forceinline__ static int first_lane() {
    return threadIdx.x % kWarp / kLanes * kLanes;
  }
  // The tile's lanes in its warp.
  __device__ __forceinline__ static unsigned mask() { return kFull << first_lane(); }
  __device__ __forceinline__ static int64_t number() {
    return (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / kLanes;
  }
  template <typename T>
  __device__ __forceinline__ static T of_lane(T value, int lane) {
    return __shfl_sync(mask(), value, lane, kLanes);
  }
  // Bit i is that of lane i.
  __device__ __forceinline__ static unsigned ballot(bool value) {
    return __ballot_sync(mask(), value) >> first_lane() & kFull;
  }
  // The bits of all lanes. Tiles of a warp would take turns at a reduction instruction.
  __device__ __forceinline__ static unsigned bits_of_all(unsigned bits) {
    if constexpr (kLanes == kWarp) {
      return __reduce_or_sync(mask(), bits);
    } else {
#pragma unroll
      for (int offset = kLanes / 2; offset; offset /= 2) {
        bits |= __shfl_xor_sync(mask(), bits, offset);
      }
      return bits;
    }
  }
  __device__ __forceinline__ static float sum(float x) {
#pragma unroll
    for (int offset = kLanes / 2; offset; offset /= 2) x += __shfl_xor_sync(mask(), x, offset);
    return x;
  }
};

}  // namespace torchrec_hkv::hash_table::cuda
