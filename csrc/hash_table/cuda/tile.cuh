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
  // Bit i: lane i's.
  __device__ __forceinline__ static unsigned ballot(bool value) {
    return __ballot_sync(mask(), value) >> first_lane() & kFull;
  }
  __device__ __forceinline__ static float sum(float x) {
#pragma unroll
    for (int offset = kLanes / 2; offset; offset /= 2) x += __shfl_xor_sync(mask(), x, offset);
    return x;
  }
};

// The columns of a gradient that a lane has, as LaneColumns, before they are widened.
template <typename Element, int kLanes, int kVectors>
struct StoredLaneColumns {
  StoredColumns<Element> v[kVectors];

  // once: it is not worth a place in L1.
  __device__ __forceinline__ static StoredLaneColumns load(const Output<const char>& grad,
                                                           int64_t place, int32_t dim,
                                                           bool once = false) {
    const Element* from = reinterpret_cast<const Element*>(grad.data) + place;
    StoredLaneColumns c;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int32_t column = (threadIdx.x % kLanes + i * kLanes) * 4;
      if (column >= dim) {
        c.v[i] = StoredColumns<Element>::zero();
      } else if (once) {
        c.v[i] = StoredColumns<Element>::load_once(from + column);
      } else {
        c.v[i] = StoredColumns<Element>::load(from + column);
      }
    }
    return c;
  }
};

// The columns of a row that a lane has: vectors of four, kLanes * 4 columns apart.
template <int kLanes, int kVectors>
struct LaneColumns {
  template <typename Element>
  using Stored = StoredLaneColumns<Element, kLanes, kVectors>;

  Columns<4> v[kVectors];

  __device__ __forceinline__ static int32_t column(int vector) {
    return (threadIdx.x % kLanes + vector * kLanes) * 4;
  }
  __device__ __forceinline__ static LaneColumns zero() {
    LaneColumns c;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) c.v[i] = Columns<4>::zero();
    return c;
  }
  // Of a row that is not worth a place in L1. policy: of the second-level cache, or none.
  template <typename... Policy>
  __device__ __forceinline__ static LaneColumns load_once(const float* row, int32_t dim,
                                                          Policy... policy) {
    LaneColumns c;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      c.v[i] = column(i) < dim ? cuda::load_once(row + column(i), policy...) : Columns<4>::zero();
    }
    return c;
  }
  __device__ __forceinline__ void store(float* row, int32_t dim) const {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      if (column(i) < dim) v[i].store(row + column(i));
    }
  }
  // A gradient of this type.
  template <typename Element>
  __device__ __forceinline__ void add(float scale, const Stored<Element>& other, RowType type) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) v[i].add(scale, other.v[i].widened(type));
  }
};

}  // namespace torchrec_hkv::hash_table::cuda
