// The pairs of a batch, a slot and a bag for each position.
//
// Where most slots are unique, only the positions of the others are sorted. They come first, in the
// order of the batch, and the unique ones behind them, from the last one on: those of a bag stay
// neighbours, so that its gradient is read once.
#include <cub/block/block_scan.cuh>

#include "common/chain.cuh"
#include "common/cuda_check.h"
#include "hash_table/cuda/offsets.cuh"
#include "hash_table/cuda/small_sort.cuh"
#include "hash_table/cuda/update/update.cuh"

namespace torchrec_hkv::hash_table::cuda {
namespace {

struct Larger {
  __device__ __forceinline__ uint32_t operator()(uint32_t a, uint32_t b) const { return max(a, b); }
};

// A block finds the bags of neighbouring positions from where bags begin. kSome: only repeated slots
// are to be sorted.
template <bool kSome>
__global__ void __launch_bounds__(kThreads)
    prepare_kernel(const Batch batch, const int64_t* __restrict__ slots, uint64_t no_slot,
                   const __grid_constant__ Scratch scratch) {
  using Scan = cub::BlockScan<uint32_t, kThreads>;
  constexpr int kWarps = kThreads / kWarp;
  __shared__ uint32_t bags[kPrepared];  // counted from the first
  __shared__ int64_t first_bag;
  __shared__ typename Scan::TempStorage scan;
  __shared__ uint32_t repeated_before[kPreparedOfThread * kWarps];  // in the block, by round and warp
  __shared__ uint32_t repeated_before_block;
  if constexpr (kSome) {
    enter_chain();
  } else {
    if (blockIdx.x == 0) {
      for (int32_t f = threadIdx.x; f < batch.num_features; f += kThreads) {
        const int64_t length = batch.feature_start(f + 1) - batch.feature_start(f);
        if (length > 0) atomicMax(scratch.longest_feature, static_cast<uint32_t>(length));
      }
    }
    note_bad_bag(batch, scratch.bad_bag);  // the first kernel of an update to read offsets
  }
  const int64_t block = kSome ? take_block(scratch.block_order) : int64_t{blockIdx.x};
  const int64_t num_bags = batch.num_bags;
  const int64_t begin = block * kPrepared;
  const auto count =
      static_cast<int32_t>(min(static_cast<int64_t>(kPrepared), batch.num_ids - begin));
  if (threadIdx.x < kWarp) {
    const int64_t bag = bag_at(batch.offsets, num_bags, begin);
    if (threadIdx.x == 0) first_bag = bag;
  }
  for (int i = threadIdx.x; i < kPrepared; i += kThreads) bags[i] = 0;
  __syncthreads();
  for (int64_t bag = first_bag + 1 + threadIdx.x; bag < num_bags; bag += kThreads) {
    const int64_t at = batch.offsets[bag] - begin;
    if (at >= count) break;
    if (at < 0) continue;                                          // offsets that decrease
    atomicMax(&bags[at], static_cast<uint32_t>(bag - first_bag));  // empty bags give way
  }
  __syncthreads();
  uint32_t mine[kPreparedOfThread];
#pragma unroll
  for (int k = 0; k < kPreparedOfThread; ++k) mine[k] = bags[threadIdx.x * kPreparedOfThread + k];
  Scan(scan).InclusiveScan(mine, mine, Larger());
#pragma unroll
  for (int k = 0; k < kPreparedOfThread; ++k) bags[threadIdx.x * kPreparedOfThread + k] = mine[k];
  // From here on a thread has positions kThreads apart.
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  uint64_t key[kPreparedOfThread];
  unsigned repeated[kPreparedOfThread];  // of the warp's positions, a bit each
#pragma unroll
  for (int k = 0; k < kPreparedOfThread; ++k) {
    const int i = k * kThreads + threadIdx.x;
    const int64_t slot = i < count ? slots[begin + i] : kNoSlot;
    key[k] = slot == kNoSlot ? no_slot : static_cast<uint64_t>(slot);
    if constexpr (kSome) {
      repeated[k] = __ballot_sync(kAllLanes, slot != kNoSlot && scratch.repeats.repeated(slot));
      if (lane == 0) repeated_before[k * kWarps + warp] = __popc(repeated[k]);
    }
  }
  __syncthreads();
  if constexpr (kSome) {
    static_assert(kPreparedOfThread * kWarps <= kThreads);
    const bool counts = threadIdx.x < kPreparedOfThread * kWarps;
    uint32_t before = counts ? repeated_before[threadIdx.x] : 0;
    uint32_t own;
    Scan(scan).ExclusiveSum(before, before, own);
    if (counts) repeated_before[threadIdx.x] = before;
    if (warp == 0) {
      const uint32_t of_others = look_back(scratch.block_order.states, block, own);
      if (lane == 0) {
        repeated_before_block = of_others;
        if (begin + count == batch.num_ids) *scratch.repeated = of_others + own;
      }
    }
    __syncthreads();
  }
#pragma unroll
  for (int k = 0; k < kPreparedOfThread; ++k) {
    const int i = k * kThreads + threadIdx.x;
    if (i >= count) break;
    const auto bag = static_cast<uint32_t>(first_bag + bags[i]);
    int64_t place = begin + i;
    if constexpr (kSome) {
      const uint32_t before = repeated_before_block + repeated_before[k * kWarps + warp] +
                              __popc(repeated[k] & ((1u << lane) - 1));
      if (repeated[k] >> lane & 1) {
        place = before;
        scratch.small_sort.count(0, before, key[k]);
      } else {
        place = batch.num_ids - 1 - (place - before);
      }
    }
    scratch.pairs.pairs.set(place, key[k],
                            scratch.bags == nullptr ? bag : static_cast<uint32_t>(begin + i));
    if (scratch.bags != nullptr) scratch.bags[begin + i] = bag;
  }
}

}  // namespace

void prepare_pairs(const Batch& batch, const int64_t* slots, uint64_t no_slot,
                   const Scratch& scratch, bool some, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(prepare_blocks(batch.num_ids));
  if (some) {
    launch_chained(prepare_kernel<true>, blocks, kThreads, stream, batch, slots, no_slot, scratch);
  } else {
    prepare_kernel<false><<<blocks, kThreads, 0, stream>>>(batch, slots, no_slot, scratch);
    HKV_CUDA_CHECK_LAUNCH();
  }
}

}  // namespace torchrec_hkv::hash_table::cuda
