// A radix sort of pairs of a 32-bit key and a position, least significant digit first. It has one
// launch per digit of eight bits, whose tiles find the places of their keys by decoupled
// look-back (Adinets and Merrill, Onesweep, 2022). The kernel that creates the keys counts all
// digits.
//
// Unlike CUB's sort, it has no launches for counting (most of the difference in time), it chains
// launches, and its tiles are large enough that the tiles of a million keys run at the same time.
#pragma once

#include <cstdint>

#include "tensor_train/cuda/index/index.cuh"

namespace torchrec_hkv::tensor_train::cuda {

constexpr int kRadix = 256;
constexpr int kMaxPasses = 4;
// Largest number of keys, limited by the bits of a count in a tile's state.
constexpr int64_t kMaxSorted = int64_t{1} << 30;

struct RadixSort {
  int passes;
  int64_t num_tiles;
  uint32_t* counts;       // [kMaxPasses][kRadix] number of keys with each digit
  uint32_t* tickets;      // [kMaxPasses]
  uint32_t* states;       // [passes][num_tiles][kRadix] states of tiles for their successors
  uint32_t* keys[2];      // keys[0] is the input; both are written
  int32_t* positions[2];  // positions of sorted keys

  __device__ __forceinline__ int64_t num_states() const { return passes * num_tiles * kRadix; }
  int last() const { return passes % 2; }  // index of the sorted pairs
};

// bits: number of bits of the keys.
RadixSort allocate_radix_sort(BufferAllocator& allocator, int64_t n, int bits);

// Must be called before the kernel that creates the keys. That kernel counts their digits in zeroed
// shared memory, adds the counts to `counts`, and zeroes the states.
void begin_radix_sort(const RadixSort& sort, cudaStream_t stream);
void radix_sort(const RadixSort& sort, int64_t n, cudaStream_t stream);

}  // namespace torchrec_hkv::tensor_train::cuda
