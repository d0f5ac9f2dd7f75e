// Loads, digests and counting on the GPU.
#pragma once

#include <cstdint>

#include "hash_table/table_view.h"

namespace torchrec_hkv::hash_table::cuda {

constexpr int kThreads = 256;
constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;
// A bucket's digests are eight vectors of 16 bytes, eight digests each.
constexpr int kLineVectors = 8;
constexpr int kVectorDigests = kBucketDigests / kLineVectors;

inline unsigned grid_for(int64_t threads) {
  const int64_t blocks = (threads + kThreads - 1) / kThreads;
  return static_cast<unsigned>(blocks > 0 ? blocks : 1);
}

// Loads that bypass L1, for data that other blocks change during the kernel.
__device__ __forceinline__ uint4 load_vector_l2(const void* from) {
  uint4 v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from)
               : "memory");
  return v;
}
// The same through L1, which may return stale values.
__device__ __forceinline__ uint4 load_vector_cached(const void* from) {
  uint4 v;
  asm volatile("ld.global.ca.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from));
  return v;
}
// The same for read-only data that should not occupy L1.
__device__ __forceinline__ uint4 load_vector_once(const void* from) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from));
  return v;
}
__device__ __forceinline__ uint32_t load_once(const uint32_t* from) {
  uint32_t v;
  asm volatile("ld.global.L1::no_allocate.u32 %0, [%1];" : "=r"(v) : "l"(from));
  return v;
}
__device__ __forceinline__ int64_t load_once(const int64_t* from) {
  int64_t v;
  asm volatile("ld.global.L1::no_allocate.b64 %0, [%1];" : "=l"(v) : "l"(from));
  return v;
}
__device__ __forceinline__ uint32_t load_l2(const uint32_t* from) {
  uint32_t v;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
  return v;
}
__device__ __forceinline__ uint16_t load_l2(const uint16_t* from) {
  uint16_t v;
  asm volatile("ld.relaxed.gpu.global.u16 %0, [%1];" : "=h"(v) : "l"(from) : "memory");
  return v;
}
__device__ __forceinline__ unsigned long long load_l2(const unsigned long long* from) {
  unsigned long long v;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(from) : "memory");
  return v;
}
__device__ __forceinline__ ulonglong2 load_pair_l2(const uint64_t* from) {
  ulonglong2 v;
  asm volatile("ld.relaxed.gpu.global.v2.u64 {%0,%1}, [%2];"
               : "=l"(v.x), "=l"(v.y)
               : "l"(from)
               : "memory");
  return v;
}
// Writes of a thread before it releases a word are visible to threads that have acquired the word.
__device__ __forceinline__ uint32_t load_acquire(const uint32_t* from) {
  uint32_t v;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
  return v;
}
__device__ __forceinline__ void store_release(uint32_t* to, uint32_t value) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}
__device__ __forceinline__ void store_l2(uint32_t* to, uint32_t value) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}
__device__ __forceinline__ void store_l2(unsigned long long* to, unsigned long long value) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(value) : "memory");
}
__device__ __forceinline__ void store_l2(uint16_t* to, uint16_t value) {
  asm volatile("st.relaxed.gpu.global.u16 [%0], %1;" ::"l"(to), "h"(value) : "memory");
}

// Prefetches memory into L2. Bytes and address are multiples of 16, or one sector.
__device__ __forceinline__ void prefetch_l2(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}
__device__ __forceinline__ void prefetch_l2(const void* address, uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(address), "r"(bytes));
#else
  for (uint32_t b = 0; b < bytes; b += 32) prefetch_l2(static_cast<const char*>(address) + b);
#endif
}

// L2 cache policy of data that is not needed again soon: evicted first.
__device__ __forceinline__ uint64_t evict_first() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
// L2 cache policy of data that is evicted last.
__device__ __forceinline__ uint64_t evict_last() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
// As load_vector_once, with an L2 cache policy.
__device__ __forceinline__ uint4 load_vector_once(const void* from, uint64_t policy) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.L2::cache_hint.v4.u32 {%0,%1,%2,%3}, [%4], %5;"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from), "l"(policy));
  return v;
}

// Bit p of the result: digest p of the vector's eight equals the wanted one.
__device__ __forceinline__ uint32_t match_vector(uint4 digests, uint16_t wanted) {
  const uint32_t pattern = wanted * 0x00010001u;
  const auto pair = [&](uint32_t two) {
    const uint32_t equal = __vcmpeq2(two, pattern) & 0x00020001u;
    return (equal | equal >> 16) & 3u;
  };
  return pair(digests.x) | pair(digests.y) << 2 | pair(digests.z) << 4 | pair(digests.w) << 6;
}

__device__ __forceinline__ const uint16_t* digest_line(const TableView& table, uint32_t bucket) {
  return table.digests + static_cast<int64_t>(bucket) * kBucketDigests;
}

__device__ __forceinline__ void count(const TableView& table, Counter counter, uint64_t by) {
  atomicAdd(reinterpret_cast<unsigned long long*>(&table.counters[counter]),
            static_cast<unsigned long long>(by));
}

}  // namespace torchrec_hkv::hash_table::cuda
