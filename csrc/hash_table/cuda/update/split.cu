// The positions whose slots are repeated, where most are not, split off in the order of the batch.
// Their number is known to the device alone.
#include <algorithm>

#include "common/chain.cuh"
#include "hash_table/cuda/offsets.cuh"
#include "hash_table/cuda/small_sort.cuh"
#include "hash_table/cuda/update/update.cuh"

namespace torchrec_hkv::hash_table::cuda {
namespace {

// The bags that the first and the last position of a part of the batch are in.
struct BagsOfPart {
  int64_t begin, end;  // positions
  int64_t first, last;

  // Of a position between. Bags are mostly of about one length, so its place says where to look.
  __device__ __forceinline__ int64_t bag_of(const int64_t* offsets, int64_t position) const {
    const auto bags = static_cast<uint64_t>(last - first + 1);
    const auto before = static_cast<uint64_t>(position - begin);
    int64_t low = first, high = last + 1;  // low begins at the position or before, high behind it
    const int64_t guess = first + static_cast<int64_t>(before * bags / (end - begin));
    if (offsets[guess] <= position) {
      low = guess;
      for (int64_t step = 1; low + step < high; step *= 4) {
        if (offsets[low + step] > position)
          high = low + step;
        else
          low += step;
      }
    } else {
      high = guess;
      for (int64_t step = 1; high - step > low; step *= 4) {
        if (offsets[high - step] <= position)
          low = high - step;
        else
          high -= step;
      }
    }
    while (high - low > 1) {
      const int64_t middle = low + (high - low) / 2;
      (offsets[middle] <= position ? low : high) = middle;
    }
    return low;
  }
};

// Of a multiprocessor, for large batches: so few that the pooling beside keeps most of its places
// while they wait for one access after the other.
constexpr int kSplitBlocks = 2;

// A block takes one part of the batch after the other.
template <int kOfThread>
__global__ void __launch_bounds__(kSplitThreads, 4)
    split_kernel(const Batch batch, const int64_t* __restrict__ slots,
                 const __grid_constant__ Scratch scratch) {
  __shared__ BagsOfPart part;
  enter_chain();
  constexpr int64_t kPart = kSplitThreads * kOfThread;
  const int64_t parts = (batch.num_ids + kPart - 1) / kPart;
  const SmallSort& sort = scratch.small_sort;
  const bool refused = *scratch.bad_bag != 0;  // nothing is sorted then
  for (;;) {
    const int64_t block = take_block(scratch.split_order);
    if (block >= parts) return;
    if (threadIdx.x < 2 * kWarp) {
      const int64_t begin = block * kPart, end = min(begin + kPart, batch.num_ids);
      const bool of_first = threadIdx.x < kWarp;
      const int64_t bag = bag_at(batch.offsets, batch.num_bags, of_first ? begin : end - 1);
      if (threadIdx.x == 0) part.begin = begin, part.end = end, part.first = bag;
      if (threadIdx.x == kWarp) part.last = bag;
    }
    const auto wanted = [&](int64_t at) {
      if (refused) return false;
      const int64_t slot = slots[at];
      return slot != kNoSlot && scratch.repeats.repeated(slot);
    };
    const auto emit = [&](uint32_t place, int64_t at) {
      const auto key = static_cast<uint64_t>(slots[at]);
      const auto bag = static_cast<uint32_t>(part.bag_of(batch.offsets, at));
      scratch.pairs.pairs.set(place, key,
                              scratch.bags == nullptr ? bag : static_cast<uint32_t>(at));
      if (scratch.bags != nullptr) scratch.bags[at] = bag;
      sort.count(0, place, key);
      scratch.chains.add(place, key);
    };
    list_in_order<kOfThread, kSplitThreads>(
        batch.num_ids, block, scratch.split_order, wanted, emit,
        [&](uint32_t number) { *scratch.split = number; },
        [&](int64_t at, unsigned listed) { scratch.repeated_positions[at / kWarp] = listed; });
    __syncthreads();  // the next turn writes what this one reads
  }
}

}  // namespace

void split_repeated(const Batch& batch, const int64_t* slots, const Scratch& scratch,
                    cudaStream_t stream) {
  const bool large = split_of_thread(batch.num_ids) == kListedOfThread;
  const auto kernel = large ? split_kernel<kListedOfThread> : split_kernel<kSplitOfThread>;
  auto blocks = static_cast<unsigned>(split_blocks(batch.num_ids));
  if (large) blocks = std::min(blocks, resident_grid(kSplitBlocks, batch.num_ids));
  launch_chained(kernel, blocks, kSplitThreads, stream, batch, slots, scratch);
}

}  // namespace torchrec_hkv::hash_table::cuda
