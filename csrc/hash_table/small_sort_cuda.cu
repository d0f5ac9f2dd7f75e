#include <algorithm>
#include <utility>

#include "common/cuda_check.h"
#include "hash_table/small_sort_cuda.cuh"

namespace torchrec_hkv::hash_table::cuda {
namespace {

constexpr int kDigits = SmallSort::kDigits;
constexpr int kSortThreads = kDigits;  // a thread a digit
constexpr int kSortWarps = kSortThreads / kWarp;
constexpr int kSortOfThread = SmallSort::kChunk / kSortThreads;

// Tiles of a sort: so few that adding up their digits is soon done.
constexpr int64_t kMostTiles = 2048;

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
      const uint32_t digit = SmallSort::digit_of(key[k], pass);
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
      const uint32_t at = places[warp][SmallSort::digit_of(key[k], pass)] + rank[k];
      to.set(at, key[k]);
      to_values[at] = value[k];
      if (next_digits != nullptr) {
        atomicAdd(&next_digits[static_cast<size_t>(at / sort.tile) * kDigits +
                               SmallSort::digit_of(key[k], pass + 1)],
                  1u);
      }
    }
    __syncthreads();
  }
}

}  // namespace

SmallSort SmallSort::of(int64_t most, int bits) {
  SmallSort sort{};
  sort.passes = (bits + kDigitBits - 1) / kDigitBits;
  const int64_t chunks = std::max<int64_t>(1, (most + kChunk - 1) / kChunk);
  sort.tile = static_cast<uint32_t>((chunks + kMostTiles - 1) / kMostTiles) * kChunk;
  sort.tiles = static_cast<uint32_t>(std::max<int64_t>(1, (most + sort.tile - 1) / sort.tile));
  return sort;
}

void sort_small(SortedPairs* pairs, const uint32_t* number, const SmallSort& sort,
                cudaStream_t stream) {
  for (int pass = 0; pass < sort.passes; ++pass) {
    sort_pass_kernel<<<sort.tiles, kSortThreads, 0, stream>>>(
        pairs->keys, pairs->other_keys, pairs->values, pairs->other_values, number, sort, pass);
    HKV_CUDA_CHECK_LAUNCH();
    std::swap(pairs->keys, pairs->other_keys);
    std::swap(pairs->values, pairs->other_values);
  }
}

}  // namespace torchrec_hkv::hash_table::cuda
