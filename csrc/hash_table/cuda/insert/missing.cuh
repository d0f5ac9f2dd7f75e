// The ids of a batch that a find has missed: deduplicated in scratch memory that fits the
// second-level cache. One position of each goes on, the others remember it.
#pragma once

#include <cstdint>

#include "hash_table/cuda/bucket.cuh"

namespace torchrec_hkv::hash_table::cuda {

// slots[] between the kernels of an insertion, besides slots, kNoSlot for a missing id, and
// kNotAdmitted (admission.h) and kPassedOver, which are neither missing nor remembered.
// A missing id of whose buckets no slot is free:
constexpr int64_t kMissingFromFull = INT64_MIN + 1;
// The same, of an id that its table remembers as evicted; between insert_kernel and evict_kernel.
constexpr int64_t kReturningToFull = INT64_MIN + 2;
// A position whose id another position stands for:
__device__ __forceinline__ int64_t remember(int64_t position) { return -2 - position; }
__device__ __forceinline__ bool is_remembered(int64_t slot) {
  return slot <= -2 && slot >= -2 - int64_t{0xffffffff};
}
__device__ __forceinline__ int64_t remembered(int64_t slot) { return -2 - slot; }
__device__ __forceinline__ bool is_missing(int64_t slot) {
  return slot == kNoSlot || slot == kMissingFromFull;
}

// Scratch of one call, memory of which nothing is known before.
struct Missing {
  uint32_t* any;      // flag: whether any id is missing
  uint32_t* full;     // flag: whether any missing id finds its buckets full
  uint32_t* waiting;  // flag: whether any position remembers another
  uint32_t* table;    // [mask + 1] 1 + position, 0: free; zeroed by the find
  uint32_t mask;
  size_t bytes;  // of all
  // Not part of it: [positions], where wanted: whether the position's id was placed for it. Zeros
  // before the insertion.
  bool* placed = nullptr;
  // Whether insert_kernel and evict_kernel count ids that tables remember as evicted.
  bool returns = false;
};

inline Missing missing_layout(int64_t n, char* base) {
  constexpr size_t kFlagBytes = 128;  // a line of their own
  // At most two thirds full, even where all ids are new; so six to twelve bytes an id.
  uint32_t size = 1024;
  while (size < n + n / 2 && size < (1u << 31)) size *= 2;
  Missing missing;
  missing.any = reinterpret_cast<uint32_t*>(base);
  missing.full = missing.any + 1;
  missing.waiting = missing.any + 2;
  missing.table = reinterpret_cast<uint32_t*>(base + kFlagBytes);
  missing.mask = size - 1;
  missing.bytes = kFlagBytes + static_cast<size_t>(size) * sizeof(uint32_t);
  return missing;
}

__device__ __forceinline__ const TableView& table_at(const TableView* tables, const Batch& batch,
                                                     int64_t position) {
  return tables[batch.feature_tables[batch.feature_of(position)]];
}

// Where the search for an id begins.
__device__ __forceinline__ uint32_t scratch_hash(const TableView& table, int64_t id) {
  return static_cast<uint32_t>(
      mix64(static_cast<uint64_t>(id) + (static_cast<uint64_t>(table.first_slot) << 20)));
}

// Whether the position with number `other` has the id, of the same table.
template <bool kOneTable>
__device__ __forceinline__ bool same_id(const TableView* tables, const TableView& table,
                                        const Batch& batch, int64_t other, int64_t id) {
  return batch.ids[other] == id && (kOneTable || &table_at(tables, batch, other) == &table);
}

// The position that stands for an id: the given one if it is the first to come.
template <bool kOneTable>
__device__ __forceinline__ int64_t representative(const Missing& missing, const TableView* tables,
                                                  const TableView& table, const Batch& batch,
                                                  int64_t position, int64_t id) {
  for (uint32_t at = scratch_hash(table, id);; ++at) {
    const uint32_t index = at & missing.mask;
    // Looking first keeps a hot new id from swapping at one address thousands of times.
    uint32_t there = load_l2(&missing.table[index]);
    if (there == 0) {
      there = atomicCAS(&missing.table[index], 0u, static_cast<uint32_t>(position + 1));
    }
    if (there == 0) return position;
    const int64_t other = static_cast<int64_t>(there) - 1;
    if (same_id<kOneTable>(tables, table, batch, other, id)) return other;
  }
}

// Adds `each` to a counter of each lane's table where `wanted`: one atomic a warp and table.
__device__ __forceinline__ void count_warp(const TableView* table, Counter counter, bool wanted,
                                           int64_t each = 1) {
  unsigned left = __ballot_sync(kAllLanes, wanted);
  while (left) {
    const int first = __ffs(static_cast<int>(left)) - 1;
    const auto address = __shfl_sync(kAllLanes, reinterpret_cast<uint64_t>(table), first);
    const unsigned peers =
        __ballot_sync(kAllLanes, wanted && reinterpret_cast<uint64_t>(table) == address);
    if (threadIdx.x % kWarp == static_cast<unsigned>(first)) {
      count(*table, counter, each * __popc(peers));
    }
    left &= ~peers;
  }
}

}  // namespace torchrec_hkv::hash_table::cuda
