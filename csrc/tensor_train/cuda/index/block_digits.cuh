// Counts each digit in a block of threads, one item for each thread. index_small.cu and
// index_medium.cu sort by these counts.
#pragma once

#include <cstdint>

#include "common/scan.cuh"
#include "tensor_train/cuda/contract/tensor_core.cuh"

namespace torchrec_hkv::tensor_train::cuda {

constexpr int kDigits = 256;
constexpr int kMaxWarps = 32;

struct BlockDigits {
  uint16_t before[kMaxWarps][kDigits];  // number of items of earlier warps with the digit
  int32_t all[kDigits];
};

// Counts the digits of existing items, for several kinds of digits at once, each in its own memory.
// ranks: number of earlier lanes with the same digit. The counts are valid after the next barrier.
// Needs at least kDigits threads.
template <int kKinds>
__device__ __forceinline__ void count_digits(BlockDigits* shared, const uint32_t (&digits)[kKinds],
                                             bool here, int (&ranks)[kKinds]) {
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int warps = blockDim.x / 32;
#pragma unroll
  for (int kind = 0; kind < kKinds; ++kind) {
    for (int i = thread; i < warps * kDigits / 2; i += blockDim.x) {
      reinterpret_cast<uint32_t*>(shared[kind].before)[i] = 0;
    }
  }
  __syncthreads();
#pragma unroll
  for (int kind = 0; kind < kKinds; ++kind) {
    const uint32_t digit = digits[kind];
    // The lanes of the warp with the same digit.
    unsigned same = __ballot_sync(kAllLanes, here);
#pragma unroll
    for (int bit = 0; bit < 8; ++bit) {
      const unsigned set = __ballot_sync(kAllLanes, digit >> bit & 1);
      same &= (digit >> bit & 1) ? set : ~set;
    }
    ranks[kind] = __popc(same & ((1u << lane) - 1));
    if (here && ranks[kind] == 0) {
      shared[kind].before[warp][digit] = static_cast<uint16_t>(__popc(same));
    }
  }
  __syncthreads();
  for (int i = thread; i < kKinds * kDigits; i += blockDim.x) {
    BlockDigits& block = shared[i / kDigits];
    const int digit = i % kDigits;
    uint16_t counts[kMaxWarps];  // all loads come before the stores
#pragma unroll
    for (int w = 0; w < kMaxWarps; ++w) counts[w] = w < warps ? block.before[w][digit] : 0;
    int32_t sum = 0;
#pragma unroll
    for (int w = 0; w < kMaxWarps; ++w) {
      if (w < warps) {
        block.before[w][digit] = static_cast<uint16_t>(sum);
        sum += counts[w];
      }
    }
    block.all[digit] = sum;
  }
}

}  // namespace torchrec_hkv::tensor_train::cuda
