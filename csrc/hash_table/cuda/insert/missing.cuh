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
  uint32_t* number;     // of positions whose ids are missing, the find's list of them:
  uint32_t* positions;  // [n], those of a block of the find together
  uint32_t* number_full;     // of missing ids that find their buckets full, insert_kernel's list:
  uint32_t* full_positions;  // [n]
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
  missing.number = reinterpret_cast<uint32_t*>(base);
  missing.number_full = missing.number + 1;
  missing.waiting = missing.number + 2;
  missing.table = reinterpret_cast<uint32_t*>(base + kFlagBytes);
  missing.mask = size - 1;
  missing.positions = missing.table + size;
  missing.full_positions = missing.positions + n;
  missing.bytes = kFlagBytes + (static_cast<size_t>(size) + 2 * n) * sizeof(uint32_t);
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

// A list that the blocks of a kernel append positions to: one atomic a block. In shared memory.
struct BlockPart {
  uint32_t ends[kThreads / kWarp];  // of each warp's part of the block's
  uint32_t begin;                   // of the block's part of the list
};

// Has room made for the positions of the threads that are `listed`; returns their number in the
// block. All its threads. append_listed follows.
__device__ __forceinline__ int count_listed(BlockPart& part, uint32_t* number, bool listed) {
  const unsigned lanes = __ballot_sync(kAllLanes, listed);
  if (threadIdx.x % kWarp == 0) part.ends[threadIdx.x / kWarp] = __popc(lanes);
  const int all = __syncthreads_count(listed);
  if (all > 0 && threadIdx.x == 0) part.begin = atomicAdd(number, static_cast<uint32_t>(all));
  return all;
}
__device__ __forceinline__ void append_listed(const BlockPart& part, uint32_t* list, bool listed,
                                              int64_t position) {
  const unsigned lanes = __ballot_sync(kAllLanes, listed);
  const unsigned lower = (1u << threadIdx.x % kWarp) - 1;
  uint32_t before = __popc(lanes & lower);
#pragma unroll
  for (unsigned w = 0; w < kThreads / kWarp; ++w) {
    if (w < threadIdx.x / kWarp) before += part.ends[w];
  }
  __syncthreads();  // the beginning is known
  if (listed) list[part.begin + before] = static_cast<uint32_t>(position);
}

// Of a list that a grid shares, how many entries the lanes of a warp are to have in a turn, so that
// all warps have about as much to do: a multiple of `multiple`.
__device__ __forceinline__ int even_lanes(int64_t number, int multiple) {
  const int64_t warps = static_cast<int64_t>(gridDim.x) * (kThreads / kWarp);
  const int64_t turns = (number + warps * kWarp - 1) / (warps * kWarp);
  const int64_t each = turns == 0 ? 0 : (number + warps * turns - 1) / (warps * turns);
  return static_cast<int>((each + multiple - 1) / multiple * multiple);
}

// How the threads of a grid share a list: in each turn the first lanes of every warp have one of
// its entries each. The threads of a block take equal numbers of turns.
struct Share {
  int64_t number;
  int64_t at;      // the thread's place in the list; past it: none
  int64_t begin;   // of the block's part
  int64_t stride;  // to the next turn
  bool works;      // whether the lane takes part

  __device__ __forceinline__ explicit Share(int64_t list_number, int lanes = kWarp)
      : number(list_number) {
    constexpr int kWarps = kThreads / kWarp;
    const int64_t warps = static_cast<int64_t>(gridDim.x) * kWarps;
    works = static_cast<int>(threadIdx.x % kWarp) < lanes;
    begin = static_cast<int64_t>(blockIdx.x) * kWarps * lanes;
    at = begin + static_cast<int64_t>(threadIdx.x / kWarp) * lanes + threadIdx.x % kWarp;
    stride = warps * lanes;
  }
  __device__ __forceinline__ bool more() const { return begin < number; }
  __device__ __forceinline__ bool mine() const { return works && at < number; }
  __device__ __forceinline__ void next() {
    begin += stride;
    at += stride;
  }
};

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
