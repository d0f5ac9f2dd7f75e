// Scans over the lanes of a warp and the threads of a block.
#pragma once

namespace torchrec_hkv {

struct Sum {
  template <typename T>
  __device__ __forceinline__ T operator()(T a, T b) const {
    return a + b;
  }
};
struct Max {
  template <typename T>
  __device__ __forceinline__ T operator()(T a, T b) const {
    return a < b ? b : a;
  }
};

// Combines the values of this lane and earlier lanes. Called by all lanes of a warp.
template <typename T, typename Combine = Sum>
__device__ __forceinline__ T inclusive_scan(T value, const Combine& combine = Combine()) {
  const unsigned lane = threadIdx.x % 32;
#pragma unroll
  for (unsigned step = 1; step < 32; step *= 2) {
    const T other = __shfl_up_sync(0xffffffffu, value, step);
    if (lane >= step) value = combine(other, value);
  }
  return value;
}

// A scan by all kThreads threads of a block. T{} must be the neutral element of Combine.
template <typename T, int kThreads, typename Combine = Sum>
class BlockScan {
  static constexpr int kWarps = kThreads / 32;
  static_assert(kThreads % 32 == 0 && kWarps <= 32);

 public:
  // In shared memory. The block must synchronize before it is used again.
  struct Storage {
    T of_warps[kWarps];
  };

  // Returns the combined values of earlier threads; T{} for the first thread. all: those of all
  // threads.
  __device__ static __forceinline__ T before(Storage& storage, T value, T& all) {
    constexpr Combine combine{};
    const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const T through = inclusive_scan(value, combine);
    T result = __shfl_up_sync(0xffffffffu, through, 1);
    if (lane == 0) result = T{};
    if (lane == 31) storage.of_warps[warp] = through;
    __syncthreads();
    T earlier{};
    all = T{};
#pragma unroll
    for (unsigned w = 0; w < kWarps; ++w) {
      if (w == warp) earlier = all;
      all = combine(all, storage.of_warps[w]);
    }
    return combine(earlier, result);
  }
};

}  // namespace torchrec_hkv
