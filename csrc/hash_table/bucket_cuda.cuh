// Scanning, locking and counting in a bucket on the GPU.
#pragma once

#include <cstdint>

#include "hash_table/table_view.h"

namespace torchrec_hkv::hash_table::cuda {

constexpr int kThreads = 256;
constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;
// Lanes that scan one bucket's line of digests together: 16 bytes, eight digests, each.
constexpr int kLineLanes = 8;
constexpr int kLaneDigests = kBucketDigests / kLineLanes;

inline unsigned grid_for(int64_t threads) {
  const int64_t blocks = (threads + kThreads - 1) / kThreads;
  return static_cast<unsigned>(blocks > 0 ? blocks : 1);
}

// Loads that bypass L1, for data that other blocks change during the kernel.
__device__ __forceinline__ uint4 load_line_l2(const void* from) {
  uint4 v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from)
               : "memory");
  return v;
}
__device__ __forceinline__ int64_t load_l2(const int64_t* from) {
  int64_t v;
  asm volatile("ld.relaxed.gpu.global.s64 %0, [%1];" : "=l"(v) : "l"(from) : "memory");
  return v;
}
__device__ __forceinline__ uint32_t load_l2(const uint32_t* from) {
  uint32_t v;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
  return v;
}
__device__ __forceinline__ void store_l2(int64_t* to, int64_t value) {
  asm volatile("st.relaxed.gpu.global.s64 [%0], %1;" ::"l"(to), "l"(value) : "memory");
}
__device__ __forceinline__ void store_l2(uint32_t* to, uint32_t value) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}
__device__ __forceinline__ void store_l2(uint16_t* to, uint16_t value) {
  asm volatile("st.relaxed.gpu.global.u16 [%0], %1;" ::"l"(to), "h"(value) : "memory");
}

// Bit p of the result: digest p of the lane's eight equals the wanted one.
__device__ __forceinline__ uint32_t match_lane(uint4 digests, uint16_t wanted) {
  const uint32_t pattern = wanted * 0x00010001u;
  const auto pair = [&](uint32_t two) {
    const uint32_t equal = __vcmpeq2(two, pattern) & 0x00020001u;
    return (equal | equal >> 16) & 3u;
  };
  return pair(digests.x) | pair(digests.y) << 2 | pair(digests.z) << 4 | pair(digests.w) << 6;
}

// One lock bit a bucket; the bitmap is small enough to stay in L2.
__device__ __forceinline__ bool try_lock(uint32_t* locks, uint32_t bucket) {
  const uint32_t bit = 1u << (bucket & 31);
  return !(atomicOr(&locks[bucket >> 5], bit) & bit);
}
__device__ __forceinline__ void unlock(uint32_t* locks, uint32_t bucket) {
  atomicAnd(&locks[bucket >> 5], ~(1u << (bucket & 31)));
}
// Takes both locks or none, the lower bucket first: whoever holds the highest contended lock goes
// on, so two tiles that want each other's bucket can't give way to each other for ever. The fence
// orders what the last holder wrote before what we read.
__device__ __forceinline__ bool try_lock_both(uint32_t* locks, uint32_t a, uint32_t b) {
  const uint32_t low = min(a, b), high = max(a, b);
  if (!try_lock(locks, low)) return false;
  if (low != high && !try_lock(locks, high)) {
    unlock(locks, low);
    return false;
  }
  __threadfence();
  return true;
}
__device__ __forceinline__ void unlock_both(uint32_t* locks, uint32_t a, uint32_t b) {
  __threadfence();
  if (a != b) unlock(locks, b);
  unlock(locks, a);
}

__device__ __forceinline__ void touch(const TableView& table, int64_t slot, uint32_t step) {
  // Testing first keeps hot ids from writing one address thousands of times.
  if (load_l2(&table.last_steps[slot]) != step) store_l2(&table.last_steps[slot], step);
  if (table.frequencies != nullptr && load_l2(&table.frequencies[slot]) != 0xffffffffu) {
    atomicAdd(&table.frequencies[slot], 1u);
  }
}

__device__ __forceinline__ void count(const TableView& table, Counter counter, uint64_t by) {
  atomicAdd(reinterpret_cast<unsigned long long*>(&table.counters[counter]),
            static_cast<unsigned long long>(by));
}

}  // namespace torchrec_hkv::hash_table::cuda
