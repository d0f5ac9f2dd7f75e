// How often each digit occurs in a block of threads, an item a thread: what both index_small.cu and
// index_medium.cu sort by.
#pragma once

#include <cstdint>

#include "tensor_train/tensor_core.cuh"

namespace torchrec_hkv::tensor_train::cuda {

constexpr int kDigits = 256;
constexpr int kMostWarps = 32;

struct BlockDigits {
  uint16_t before[kMostWarps][kDigits];  // of earlier warps, so many items have the digit
  int32_t all[kDigits];
};

__device__ __forceinline__ int32_t inclusive_sum(int32_t value) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int32_t other = __shfl_up_sync(kAllLanes, value, step);
    if (lane >= step) value += other;
  }
  return value;
}

// Counts the digits of the items that are here; how many lanes before this one have its digit. The
// counts are there after the next barrier. At least kDigits threads.
__device__ __forceinline__ int count_digits(BlockDigits& shared, uint32_t digit, bool here) {
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int warps = blockDim.x / 32;
  for (int i = thread; i < warps * kDigits / 2; i += blockDim.x) {
    reinterpret_cast<uint32_t*>(shared.before)[i] = 0;
  }
  __syncthreads();
  // Which lanes of the warp have the same digit.
  unsigned same = __ballot_sync(kAllLanes, here);
#pragma unroll
  for (int bit = 0; bit < 8; ++bit) {
    const unsigned set = __ballot_sync(kAllLanes, digit >> bit & 1);
    same &= (digit >> bit & 1) ? set : ~set;
  }
  const int rank = __popc(same & ((1u << lane) - 1));
  if (here && rank == 0) shared.before[warp][digit] = static_cast<uint16_t>(__popc(same));
  __syncthreads();
  if (thread < kDigits) {  // a digit a thread; all loads come before the stores
    uint16_t counts[kMostWarps];
#pragma unroll
    for (int w = 0; w < kMostWarps; ++w) counts[w] = w < warps ? shared.before[w][thread] : 0;
    int32_t sum = 0;
#pragma unroll
    for (int w = 0; w < kMostWarps; ++w) {
      if (w < warps) {
        shared.before[w][thread] = static_cast<uint16_t>(sum);
        sum += counts[w];
      }
    }
    shared.all[thread] = sum;
  }
  return rank;
}

}  // namespace torchrec_hkv::tensor_train::cuda
