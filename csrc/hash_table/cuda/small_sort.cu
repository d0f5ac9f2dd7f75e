#include <utility>

#include "common/cuda_check.h"
#include "common/dependent_launch.cuh"
#include "hash_table/cuda/small_sort.cuh"

namespace torchrec_hkv::hash_table::cuda {
namespace {

constexpr int kDigits = SmallSort::kDigits;
constexpr int kSortThreads = kDigits;  // one thread for each digit
constexpr int kSortWarps = kSortThreads / kWarp;
constexpr int kSortOfThread = SmallSort::kChunk / kSortThreads;

// Tiles of a sort; few, because each pass sums their counts of digits.
constexpr int64_t kMaxTiles = 2048;
// Chunks of a tile. The keys of a tile may all have one digit, which is counted in 16 bits.
constexpr int64_t kMaxChunks = 0xffff / SmallSort::kChunk;

// A block sorts its tiles by one digit. The counts of all tiles determine the places.
__global__ void __launch_bounds__(kSortThreads)
    sort_pass_kernel(const Pairs from, const Pairs to, const uint32_t* __restrict__ number,
                     const SmallSort sort, int pass) {
  __shared__ uint32_t places[kSortWarps][kDigits];
  using Scan = BlockScan<uint32_t, kSortThreads>;
  __shared__ Scan::Storage scan;
  wait_for_kernel_before();
  const uint32_t n = *number;
  const uint32_t used = (n + sort.tile - 1) / sort.tile;
  const uint16_t* const digits = sort.counts(pass, 0);
  const bool last = pass + 1 == sort.passes;
  for (uint32_t tile = blockIdx.x; tile < used; tile += gridDim.x) {
    const uint32_t begin = tile * sort.tile;
    const uint32_t end = min(n, begin + sort.tile);
    // The place of this tile's keys with the thread's digit: after lower digits and earlier tiles.
    uint32_t before = 0, all = 0;
#pragma unroll 8
    for (uint32_t t = 0; t < used; ++t) {
      const uint32_t digit_count = digits[static_cast<size_t>(t) * kDigits + threadIdx.x];
      all += digit_count;
      if (t < tile) before += digit_count;
    }
    uint32_t keys;
    uint32_t place = before + Scan::before(scan, all, keys);
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
    for (uint32_t chunk = begin; chunk < end; chunk += SmallSort::kChunk) {
      for (int d = lane; d < kDigits; d += kWarp) places[warp][d] = 0;
      __syncwarp();
      Pair pair[kSortOfThread];
      uint32_t rank[kSortOfThread];
#pragma unroll
      for (int k = 0; k < kSortOfThread; ++k) {
        const uint32_t at = chunk + (warp * kSortOfThread + k) * kWarp + lane;
        pair[k] = at < end ? from.load(at) : Pair{};
      }
#pragma unroll
      for (int k = 0; k < kSortOfThread; ++k) {
        const bool given = chunk + (warp * kSortOfThread + k) * kWarp + lane < end;
        const uint32_t digit = SmallSort::digit_of(from.key_of(pair[k]), pass);
        const unsigned peers = __match_any_sync(kAllLanes, given ? digit : kDigits);
        rank[k] = given ? places[warp][digit] + __popc(peers & ((1u << lane) - 1)) : 0;
        __syncwarp();
        if (given && lane == __ffs(static_cast<int>(peers)) - 1)
          places[warp][digit] += __popc(peers);
        __syncwarp();
      }
      __syncthreads();
      for (int w = 0; w < kSortWarps; ++w) {
        const uint32_t digit_count = places[w][threadIdx.x];
        places[w][threadIdx.x] = place;
        place += digit_count;
      }
      __syncthreads();
#pragma unroll
      for (int k = 0; k < kSortOfThread; ++k) {
        if (chunk + (warp * kSortOfThread + k) * kWarp + lane >= end) continue;
        const uint64_t key = from.key_of(pair[k]);
        const uint32_t at = places[warp][SmallSort::digit_of(key, pass)] + rank[k];
        to.store(at, pair[k]);
        if (!last) sort.count(pass + 1, at, key);
      }
      __syncthreads();
    }
  }
}

}  // namespace

SmallSort SmallSort::of(int64_t most, int bits) {
  SmallSort sort{};
  sort.passes = (bits + kDigitBits - 1) / kDigitBits;
  const int64_t chunks = max(int64_t{1}, (most + kChunk - 1) / kChunk);
  // Counts take passes * kDigits * 2 / tile bytes for each key, at most three.
  const int64_t least = sort.passes > 3 ? (sort.passes + 2) / 3 : 1;
  const int64_t wanted = max(least, (chunks + kMaxTiles - 1) / kMaxTiles);
  sort.tile = static_cast<uint32_t>(min(wanted, kMaxChunks)) * kChunk;
  sort.tiles = static_cast<uint32_t>(max(int64_t{1}, (most + sort.tile - 1) / sort.tile));
  return sort;
}

void sort_small(SortedPairs* pairs, const uint32_t* number, const SmallSort& sort,
                cudaStream_t stream, unsigned max_blocks) {
  for (int pass = 0; pass < sort.passes; ++pass) {
    launch_dependent(sort_pass_kernel, min(sort.tiles, max_blocks), kSortThreads, stream,
                     pairs->pairs, pairs->other, number, sort, pass);
    std::swap(pairs->pairs, pairs->other);
  }
}

}  // namespace torchrec_hkv::hash_table::cuda
