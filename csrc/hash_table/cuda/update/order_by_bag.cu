// Orders short segments of equal slots by the bag of their first position. The sort has ordered
// them by slot, so neighbouring segments have gradients of random bags. If the gradients of a table
// do not fit into L2, each position then reads its gradient from memory. In the order of bags, the
// positions of a bag read one gradient at about the same time. The order in which rows are updated
// does not change results.
//
// Bags are divided into kBagBins ranges. The order within a range is arbitrary.
#include "common/cuda_check.h"
#include "common/scan.cuh"
#include "hash_table/cuda/update/update.cuh"

namespace torchrec_hkv::hash_table::cuda {
namespace {

constexpr int kOrderRounds = 4;  // positions of a thread
static_assert(kBagBins == kThreads);

// The short segment that begins at a position; of length 0 if none begins there.
struct ShortSegment {
  uint32_t length = 0;
  uint32_t bin = 0;

  __device__ __forceinline__ ShortSegment(const Batch& batch, const UpdateScratch& scratch,
                                          uint64_t no_slot, int64_t at) {
    const Pairs& sorted = scratch.pairs.pairs;
    const int64_t n = batch.num_ids;
    if (at >= n) return;
    const uint64_t key = sorted.key(at);
    if (key == no_slot || (at > 0 && sorted.key(at - 1) == key)) return;
    if (at + kLongest < n && sorted.key(at + kLongest) == key) return;
    const uint64_t bag = scratch.bag_of(sorted.value(at));
    bin = static_cast<uint32_t>(bag * kBagBins / static_cast<uint64_t>(batch.num_bags));
    length = 1;
    while (at + length < n && sorted.key(at + length) == key) ++length;
  }
};

// Position of the thread in a round.
__device__ __forceinline__ int64_t position_of(int round) {
  return (static_cast<int64_t>(blockIdx.x) * kOrderRounds + round) * kThreads + threadIdx.x;
}

__global__ void __launch_bounds__(kThreads)
    count_bins_kernel(const Batch batch, uint64_t no_slot,
                      const __grid_constant__ UpdateScratch scratch) {
  __shared__ uint32_t counts[kBagBins];
  counts[threadIdx.x] = 0;
  __syncthreads();
#pragma unroll
  for (int round = 0; round < kOrderRounds; ++round) {
    const ShortSegment segment(batch, scratch, no_slot, position_of(round));
    if (segment.length > 0) atomicAdd(&counts[segment.bin], segment.length);
  }
  __syncthreads();
  const uint32_t count = counts[threadIdx.x];
  if (count > 0) atomicAdd(&scratch.bag_bins[threadIdx.x], count);
}

__global__ void __launch_bounds__(kThreads)
    order_kernel(const Batch batch, uint64_t no_slot,
                 const __grid_constant__ UpdateScratch scratch) {
  using Scan = BlockScan<uint32_t, kThreads, Sum>;
  __shared__ Scan::Storage scan;
  __shared__ uint32_t counts[kBagBins], bin_positions[kBagBins];
  counts[threadIdx.x] = 0;
  __syncthreads();
  uint32_t lengths[kOrderRounds], bins[kOrderRounds], offsets[kOrderRounds];
#pragma unroll
  for (int round = 0; round < kOrderRounds; ++round) {
    const ShortSegment segment(batch, scratch, no_slot, position_of(round));
    lengths[round] = segment.length;
    bins[round] = segment.bin;
    offsets[round] = segment.length > 0 ? atomicAdd(&counts[segment.bin], segment.length) : 0;
  }
  __syncthreads();
  uint32_t all = 0;
  const uint32_t before = Scan::before(scan, scratch.bag_bins[threadIdx.x], all);
  const uint32_t count = counts[threadIdx.x];
  bin_positions[threadIdx.x] =
      before + (count > 0 ? atomicAdd(&scratch.bag_bins[kBagBins + threadIdx.x], count) : 0);
  if (blockIdx.x == 0 && threadIdx.x == 0) *scratch.number_short = all;
  __syncthreads();
#pragma unroll
  for (int round = 0; round < kOrderRounds; ++round) {
    const uint32_t to = bin_positions[bins[round]] + offsets[round];
    for (uint32_t k = 0; k < lengths[round]; ++k) {
      scratch.short_pairs.store(to + k, scratch.pairs.pairs.load(position_of(round) + k));
    }
  }
}

}  // namespace

void order_by_bag(const Batch& batch, uint64_t no_slot, const UpdateScratch& scratch,
                  cudaStream_t stream) {
  const unsigned blocks = grid_for((batch.num_ids + kOrderRounds - 1) / kOrderRounds);
  count_bins_kernel<<<blocks, kThreads, 0, stream>>>(batch, no_slot, scratch);
  HKV_CUDA_CHECK_LAUNCH();
  order_kernel<<<blocks, kThreads, 0, stream>>>(batch, no_slot, scratch);
  HKV_CUDA_CHECK_LAUNCH();
}

}  // namespace torchrec_hkv::hash_table::cuda
