// The positions whose slots are repeated, where most are not, split off in the order of the batch.
// Their number is known to the device alone.
#include "common/cuda_check.h"
#include "hash_table/cuda/offsets.cuh"
#include "hash_table/cuda/small_sort.cuh"
#include "hash_table/cuda/update/update.cuh"

namespace torchrec_hkv::hash_table::cuda {
namespace {

template <int kOfThread>
__global__ void __launch_bounds__(kListThreads, 2)
    split_kernel(const Batch batch, const int64_t* __restrict__ slots,
                 const __grid_constant__ Scratch scratch) {
  __shared__ int64_t first_bag;
  const SmallSort& sort = scratch.small_sort;
  const int64_t block = take_block(scratch.split_order);
  const bool refused = *scratch.bad_bag != 0;  // nothing is sorted then
  const int64_t num_bags = batch.num_bags;
  if (threadIdx.x < kWarp) {
    const int64_t bag = bag_at(batch.offsets, num_bags, block * (kListThreads * kOfThread));
    if (threadIdx.x == 0) first_bag = bag;
  }
  const auto wanted = [&](int64_t at) {
    if (refused) return false;
    const int64_t slot = slots[at];
    return slot != kNoSlot && scratch.repeats.repeated(slot);
  };
  const auto emit = [&](uint32_t place, int64_t at) {
    const auto key = static_cast<uint64_t>(slots[at]);
    int64_t low = first_bag, high = num_bags;  // its bag
    for (int64_t step = 1; low + step < num_bags; step *= 4) {
      if (batch.offsets[low + step] > at) {
        high = low + step;
        break;
      }
      low += step;
    }
    while (high - low > 1) {
      const int64_t middle = low + (high - low) / 2;
      (batch.offsets[middle] <= at ? low : high) = middle;
    }
    scratch.pairs.pairs.set(place, key, static_cast<uint32_t>(scratch.bags == nullptr ? low : at));
    if (scratch.bags != nullptr) scratch.bags[at] = static_cast<uint32_t>(low);
    sort.count(0, place, key);
  };
  list_in_order<kOfThread>(
      batch.num_ids, block, scratch.split_order, wanted, emit,
      [&](uint32_t number) { *scratch.sorted = number; },
      [&](int64_t at, unsigned listed) { scratch.repeated_positions[at / kWarp] = listed; });
}

}  // namespace

void split_repeated(const Batch& batch, const int64_t* slots, const Scratch& scratch,
                    cudaStream_t stream) {
  const int of_thread = split_of_thread(batch.num_ids);
  const auto blocks = static_cast<unsigned>(listing_blocks(batch.num_ids, of_thread));
  const auto kernel =
      of_thread == kListedOfThread ? split_kernel<kListedOfThread> : split_kernel<kSplitOfThread>;
  kernel<<<blocks, kListThreads, 0, stream>>>(batch, slots, scratch);
  HKV_CUDA_CHECK_LAUNCH();
}

}  // namespace torchrec_hkv::hash_table::cuda
