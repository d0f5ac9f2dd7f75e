// The sort of the positions whose slots are repeated, where most are not: their number is known to
// the device alone. They are split off in the order of the batch, then sorted by a stable radix
// sort, a kernel for each digit, whose blocks leave at once when there is nothing for them.
#include <cub/block/block_scan.cuh>

#include "common/cuda_check.h"
#include "hash_table/offsets_cuda.cuh"
#include "hash_table/update_cuda.cuh"

namespace torchrec_hkv::hash_table::cuda {
namespace {

constexpr int kSplitThreads = 512;
constexpr int kSplitOfThread = 16;
constexpr int kSplit = kSplitThreads * kSplitOfThread;  // positions of a block
constexpr int kSplitWarps = kSplitThreads / kWarp;

constexpr int kDigits = SmallSort::kDigits;
constexpr int kSortThreads = kDigits;  // a thread a digit
constexpr int kSortWarps = kSortThreads / kWarp;
constexpr int kSortOfThread = SmallSort::kChunk / kSortThreads;

__device__ __forceinline__ uint32_t digit_of(uint64_t key, int pass) {
  return static_cast<uint32_t>(key >> (pass * SmallSort::kDigitBits)) & (kDigits - 1);
}

// What a block of the split says of its number of positions, and of those before it.
constexpr unsigned long long kOwn = 1ull << 32;     // its own number
constexpr unsigned long long kPrefix = 1ull << 33;  // with those of all blocks before it
constexpr unsigned long long kNumber = kOwn - 1;

// Positions of all blocks before this one. All lanes of one warp.
__device__ __forceinline__ uint32_t look_back(unsigned long long* states, int64_t tile,
                                              uint32_t own) {
  const int lane = threadIdx.x % kWarp;
  uint32_t before = 0;
  if (tile > 0) {
    if (lane == 0) atomicExch(&states[tile], kOwn | own);
    for (int64_t first = tile - 1;; first -= kWarp) {
      const int64_t at = first - lane;
      unsigned long long state = kPrefix;  // nothing is before the first
      while (at >= 0 && (state = load_l2(&states[at])) == 0) {
      }
      const unsigned ends = __ballot_sync(kAllLanes, (state & kPrefix) != 0);
      const int last = ends != 0 ? __ffs(static_cast<int>(ends)) - 1 : kWarp - 1;
      before +=
          __reduce_add_sync(kAllLanes, lane <= last ? static_cast<uint32_t>(state & kNumber) : 0u);
      if (ends != 0) break;
    }
  }
  if (lane == 0) atomicExch(&states[tile], kPrefix | (before + own));
  return before;
}

__global__ void __launch_bounds__(kSplitThreads, 2)
    split_kernel(const TableView* __restrict__ tables, int32_t num_tables, const Batch batch,
                 const int64_t* __restrict__ slots, const __grid_constant__ Scratch scratch) {
  __shared__ uint32_t firsts[kSplitOfThread * kSplitWarps];  // by round and warp
  __shared__ uint16_t chosen[kSplit];                        // counted from the block's first
  __shared__ uint32_t block_tile, block_first;
  __shared__ int64_t first_bag;
  __shared__ typename cub::BlockScan<uint32_t, kSplitThreads>::TempStorage scan;
  static_assert(kSplitOfThread * kSplitWarps <= kSplitThreads && kSplit <= 1 << 16);
  const SmallSort& sort = scratch.small_sort;
  // Blocks are numbered as they begin, so that those before are under way.
  if (threadIdx.x == 0) block_tile = atomicAdd(sort.ticket, 1u);
  __syncthreads();
  const int64_t tile = block_tile;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int64_t begin = tile * kSplit;
  if (tile == 0) {
    for (int32_t t = threadIdx.x; t < num_tables; t += kSplitThreads) ++*tables[t].optimizer_step;
    if (threadIdx.x == 0) {
      *scratch.long_runs.number = *scratch.long_runs.pieces = 0;
      *scratch.runs.number = *scratch.runs.singles = 0;
    }
  }
  const bool refused = is_refused(batch);  // nothing is sorted then
  unsigned repeated[kSplitOfThread];
#pragma unroll
  for (int k = 0; k < kSplitOfThread; ++k) {
    const int64_t at = begin + k * kSplitThreads + threadIdx.x;
    const int64_t slot = at < batch.num_ids && !refused ? slots[at] : kNoSlot;
    repeated[k] = __ballot_sync(kAllLanes, slot != kNoSlot && scratch.repeats.repeated(slot));
    if (lane == 0) firsts[k * kSplitWarps + warp] = __popc(repeated[k]);
  }
  const int64_t num_bags = batch.num_bags;
  if (warp == 0) {
    const int64_t bag = bag_at(batch.offsets, num_bags, begin);
    if (lane == 0) first_bag = bag;
  }
  __syncthreads();
  const bool counts = threadIdx.x < kSplitOfThread * kSplitWarps;
  uint32_t first = counts ? firsts[threadIdx.x] : 0;
  uint32_t own;
  cub::BlockScan<uint32_t, kSplitThreads>(scan).ExclusiveSum(first, first, own);
  if (counts) firsts[threadIdx.x] = first;
  __syncthreads();
#pragma unroll
  for (int k = 0; k < kSplitOfThread; ++k) {
    if (repeated[k] >> lane & 1) {
      const int place = __popc(repeated[k] & ((1u << lane) - 1));
      chosen[firsts[k * kSplitWarps + warp] + place] =
          static_cast<uint16_t>(k * kSplitThreads + threadIdx.x);
    }
  }
  if (warp == 0) {
    const uint32_t before = look_back(sort.states, tile, own);
    if (lane == 0) {
      block_first = before;
      if (begin + kSplit >= batch.num_ids) {
        *scratch.sorted = before + own;
      }
    }
  }
  __syncthreads();
  for (uint32_t i = threadIdx.x; i < own; i += kSplitThreads) {
    const int64_t at = begin + chosen[i];
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
    const uint32_t place = block_first + i;
    scratch.keys.set(place, key);
    scratch.values[place] = static_cast<uint32_t>(scratch.bags == nullptr ? low : at);
    if (scratch.bags != nullptr) scratch.bags[at] = static_cast<uint32_t>(low);
    atomicAdd(&sort.digits[place / sort.tile * kDigits + digit_of(key, 0)], 1u);
  }
}

// A block sorts its tile by one digit: into places that the digits of all tiles tell.
__global__ void __launch_bounds__(kSortThreads)
    sort_pass_kernel(const Keys from, const Keys to, const uint32_t* __restrict__ from_values,
                     uint32_t* __restrict__ to_values, const uint32_t* __restrict__ number,
                     const SmallSort sort, int pass) {
  __shared__ uint32_t places[kSortWarps][kDigits];
  __shared__ typename cub::BlockScan<uint32_t, kSortThreads>::TempStorage scan;
  const uint32_t n = *number;
  const uint32_t tile = blockIdx.x;
  const uint32_t begin = tile * sort.tile;
  if (begin >= n) return;
  const uint32_t end = min(n, begin + sort.tile);
  const uint32_t used = (n + sort.tile - 1) / sort.tile;
  const size_t pass_size = static_cast<size_t>(sort.tiles) * kDigits;
  const uint32_t* const digits = sort.digits + pass * pass_size;
  uint32_t* const next_digits =
      pass + 1 < sort.passes ? sort.digits + (pass + 1) * pass_size : nullptr;
  // Where this tile's keys of the thread's digit go: behind those of lower digits, and of tiles
  // before.
  uint32_t before = 0, all = 0;
#pragma unroll 8
  for (uint32_t t = 0; t < used; ++t) {
    const uint32_t those = digits[static_cast<size_t>(t) * kDigits + threadIdx.x];
    all += those;
    if (t < tile) before += those;
  }
  uint32_t place;
  cub::BlockScan<uint32_t, kSortThreads>(scan).ExclusiveSum(all, place);
  place += before;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  for (uint32_t chunk = begin; chunk < end; chunk += SmallSort::kChunk) {
    for (int d = lane; d < kDigits; d += kWarp) places[warp][d] = 0;
    __syncwarp();
    uint64_t key[kSortOfThread];
    uint32_t value[kSortOfThread], rank[kSortOfThread];
#pragma unroll
    for (int k = 0; k < kSortOfThread; ++k) {
      const uint32_t at = chunk + (warp * kSortOfThread + k) * kWarp + lane;
      key[k] = at < end ? from[at] : 0;
      value[k] = at < end ? from_values[at] : 0;
    }
#pragma unroll
    for (int k = 0; k < kSortOfThread; ++k) {
      const bool given = chunk + (warp * kSortOfThread + k) * kWarp + lane < end;
      const uint32_t digit = digit_of(key[k], pass);
      const unsigned peers = __match_any_sync(kAllLanes, given ? digit : kDigits);
      rank[k] = given ? places[warp][digit] + __popc(peers & ((1u << lane) - 1)) : 0;
      __syncwarp();
      if (given && lane == __ffs(static_cast<int>(peers)) - 1) places[warp][digit] += __popc(peers);
      __syncwarp();
    }
    __syncthreads();
    for (int w = 0; w < kSortWarps; ++w) {
      const uint32_t those = places[w][threadIdx.x];
      places[w][threadIdx.x] = place;
      place += those;
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kSortOfThread; ++k) {
      if (chunk + (warp * kSortOfThread + k) * kWarp + lane >= end) continue;
      const uint32_t at = places[warp][digit_of(key[k], pass)] + rank[k];
      to.set(at, key[k]);
      to_values[at] = value[k];
      if (next_digits != nullptr) {
        atomicAdd(&next_digits[static_cast<size_t>(at / sort.tile) * kDigits +
                               digit_of(key[k], pass + 1)],
                  1u);
      }
    }
    __syncthreads();
  }
}

}  // namespace

int64_t split_tiles(int64_t n) { return (n + kSplit - 1) / kSplit; }

void sort_repeated(const TableView* tables, int32_t num_tables, const Update& update,
                   const int64_t* slots, Scratch* scratch, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(split_tiles(update.batch.num_ids));
  split_kernel<<<blocks, kSplitThreads, 0, stream>>>(tables, num_tables, update.batch, slots,
                                                     *scratch);
  HKV_CUDA_CHECK_LAUNCH();
  const SmallSort& sort = scratch->small_sort;
  for (int pass = 0; pass < sort.passes; ++pass) {
    sort_pass_kernel<<<sort.tiles, kSortThreads, 0, stream>>>(
        scratch->keys, scratch->other_keys, scratch->values, scratch->other_values, scratch->sorted,
        sort, pass);
    HKV_CUDA_CHECK_LAUNCH();
    std::swap(scratch->keys, scratch->other_keys);
    std::swap(scratch->values, scratch->other_values);
  }
}

}  // namespace torchrec_hkv::hash_table::cuda
