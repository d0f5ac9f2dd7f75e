// A radix sort of pairs of a 32-bit key and a position, least significant digits first: a launch
// for each digit of eight bits, whose tiles find out where their keys go by decoupled look-back
// (Adinets and Merrill, Onesweep, 2022). All digits are counted where the keys are made.
//
// Beside a library's sort it has no launches for counting, which are most of the difference, tiles
// of such a size that those of a million keys all run at the same time, and kernels that are
// launched one behind the other.
#pragma once

#include <cstdint>

#include "tensor_train/cuda/index/index.cuh"

namespace torchrec_hkv::tensor_train::cuda {

constexpr int kRadix = 256;
constexpr int kMostPasses = 4;
// Counts of a tile's state have so many bits.
constexpr int64_t kMostSorted = int64_t{1} << 30;

struct RadixSort {
  int passes;
  int64_t num_tiles;
  uint32_t* counts;       // [kMostPasses][kRadix] keys that have a digit
  uint32_t* tickets;      // [kMostPasses]
  uint32_t* states;       // [passes][num_tiles][kRadix] what tiles have told their successors
  uint32_t* keys[2];      // the first are sorted, both are written
  int32_t* positions[2];  // of sorted keys

  __device__ __forceinline__ int64_t num_states() const { return passes * num_tiles * kRadix; }
  int last() const { return passes % 2; }  // which of the two are the order
};

// bits: that keys have.
RadixSort carve_radix_sort(Carver& carver, int64_t n, int bits);

// Before the kernel that makes the keys. That counts their digits, in shared memory that is zero
// before and then goes to `counts`, and sets the states to zero.
void begin_radix_sort(const RadixSort& sort, cudaStream_t stream);
void radix_sort(const RadixSort& sort, int64_t n, cudaStream_t stream);

}  // namespace torchrec_hkv::tensor_train::cuda
