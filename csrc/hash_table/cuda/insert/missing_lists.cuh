// Lists the missing ids of a batch and deduplicates them in scratch memory that fits L2. One
// position of each id represents it; the others refer to that position.
#pragma once

#include <algorithm>
#include <cstdint>

#include "hash_table/cuda/bucket.cuh"

namespace torchrec_hkv::hash_table::cuda {

// Values of slots[] between the kernels of an insertion, besides slots, kNoSlot (missing),
// kNotAdmitted (admission.h) and kSkipped.
//
// A missing id without a free slot in its buckets:
constexpr int64_t kMissingFromFull = INT64_MIN + 1;
// From insert_kernel to evict_kernel: the same, for a position that represents its id.
// kReturningToFull: the table also remembers the id as evicted.
constexpr int64_t kChosenFromFull = INT64_MIN + 4;
constexpr int64_t kReturningToFull = INT64_MIN + 2;
// A missing id whose first bucket was less than three quarters full before the call:
constexpr int64_t kMissingFromFirst = INT64_MIN + 3;
// A position whose id another position represents:
__device__ __forceinline__ int64_t encode_reference(int64_t position) { return -2 - position; }
__device__ __forceinline__ bool is_reference(int64_t slot) {
  return slot <= -2 && slot >= -2 - int64_t{0xffffffff};
}
__device__ __forceinline__ int64_t decode_reference(int64_t slot) { return -2 - slot; }
__device__ __forceinline__ bool is_missing(int64_t slot) {
  return slot == kNoSlot || slot == kMissingFromFull || slot == kMissingFromFirst;
}

// Scratch of one call, uninitialised.
struct MissingLists {
  uint32_t* number;         // number of positions in the first list of missing ids
  uint32_t* number_full;    // in the second list, which has kMissingFromFull if sorts_full is set
  uint32_t* any_chosen;     // flag: whether a position in the first list is kChosenFromFull or
                            // kReturningToFull
  uint32_t* any_reference;  // flag: whether any position refers to another
  uint32_t* samples_ids;  // flag: whether a table's miniatures already see ids when the call begins
  uint32_t* table;        // [mask + 1] 1 + position, 0: free; zeroed by the find
  uint32_t mask;
  // [n] the find's two lists of positions: the first from the front, the second from the back.
  // Positions of a block are adjacent. No position is in both.
  uint32_t* positions;
  uint32_t* last_position;  // the last element of `positions`
  size_t bytes;             // of the whole scratch
  // Not part of the scratch; [positions] or null: whether the id was placed at this position. Zeros
  // before the insertion.
  bool* placed = nullptr;
  // Whether insert_kernel and evict_kernel count ids that tables remember as evicted.
  bool counts_returning = false;
  // Whether the find puts kMissingFromFull into the second list. Otherwise that list is empty.
  bool sorts_full = false;
  // Whether all or none of an id's positions have kMissingFromFirst. Admission may overwrite the
  // value.
  bool may_find_or_claim = true;

  // The numbers and the flags: number, number_full, chosen, waiting.
  __device__ __forceinline__ uint4 words() const { return load_vector_l2(number); }
  // A place in one of the lists.
  __device__ __forceinline__ uint32_t& listed(bool second, int64_t at) const {
    return second ? *(last_position - at) : positions[at];
  }
};

// min_bytes: least size of `table`, whose memory is reused after the search.
inline MissingLists missing_layout(int64_t n, size_t min_bytes, char* base) {
  constexpr size_t kFlagBytes = 128;  // a cache line of their own
  // Load factor at most 0.69 even if all ids are new: 5.8 to 11.6 bytes an id.
  uint32_t size = 1024;
  while (size < n + n * 29 / 64 && size < (1u << 31)) size *= 2;
  MissingLists missing;
  missing.number = reinterpret_cast<uint32_t*>(base);
  missing.number_full = missing.number + 1;
  missing.any_chosen = missing.number + 2;
  missing.any_reference = missing.number + 3;
  missing.samples_ids = missing.number + 4;
  missing.table = reinterpret_cast<uint32_t*>(base + kFlagBytes);
  missing.mask = size - 1;
  const size_t words = std::max<size_t>(size, min_bytes / sizeof(uint32_t));
  missing.positions = missing.table + words;
  missing.last_position = missing.positions + n - 1;
  missing.bytes = kFlagBytes + (words + n) * sizeof(uint32_t);
  return missing;
}

__device__ __forceinline__ const TableView& table_at(const TableView* tables, const Batch& batch,
                                                     int64_t position) {
  return tables[batch.feature_tables[batch.feature_of(position)]];
}

// Where an id's search in the scratch table begins.
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

// Returns the position that represents an id: `position` if it is the first to claim the entry.
template <bool kOneTable>
__device__ __forceinline__ int64_t representative(const MissingLists& missing,
                                                  const TableView* tables, const TableView& table,
                                                  const Batch& batch, int64_t position,
                                                  int64_t id) {
  for (uint32_t at = scratch_hash(table, id);; ++at) {
    const uint32_t index = at & missing.mask;
    // Reading first avoids thousands of compare-and-swaps at the address of a hot new id.
    uint32_t occupant = load_l2(&missing.table[index]);
    if (occupant == 0) {
      occupant = atomicCAS(&missing.table[index], 0u, static_cast<uint32_t>(position + 1));
    }
    if (occupant == 0) return position;
    const int64_t other = static_cast<int64_t>(occupant) - 1;
    if (same_id<kOneTable>(tables, table, batch, other, id)) return other;
  }
}

// Returns whether the position represents the id. If not, slots[position] refers to the one that
// does.
template <bool kOneTable>
__device__ __forceinline__ bool is_representative(const MissingLists& missing,
                                                  const TableView* tables, const TableView& table,
                                                  const Batch& batch, int64_t* slots,
                                                  int64_t position, int64_t id) {
  const int64_t other = representative<kOneTable>(missing, tables, table, batch, position, id);
  if (other == position) return true;
  slots[position] = encode_reference(other);
  if (load_l2(missing.any_reference) == 0) *missing.any_reference = 1;
  return false;
}

// Positions that a block appends to the two lists, by one atomic per list. In shared memory.
struct BlockListRanges {
  uint32_t of_warp[kThreads / kWarp];  // number of positions for the first list; in the upper 16
                                       // bits, for the second
  uint32_t begin[2];                   // of the block's part of each list
};

// Reserves list entries for the positions of the `listed` threads. Returns whether there are any.
// Called once by all threads of a block, before append_listed.
__device__ __forceinline__ bool count_listed(BlockListRanges& parts, const MissingLists& missing,
                                             bool listed, bool full) {
  const unsigned all = __ballot_sync(kAllLanes, listed);
  const unsigned seconds = __ballot_sync(kAllLanes, listed && full);
  if (threadIdx.x % kWarp == 0) {
    parts.of_warp[threadIdx.x / kWarp] = __popc(all & ~seconds) | __popc(seconds) << 16;
  }
  if (__syncthreads_or(listed) == 0) return false;
  if (threadIdx.x == 0) {
    uint32_t sum = 0;
#pragma unroll
    for (const uint32_t of_warp : parts.of_warp) sum += of_warp;
    if (sum & 0xffff) parts.begin[0] = atomicAdd(missing.number, sum & 0xffff);
    if (sum >> 16) parts.begin[1] = atomicAdd(missing.number_full, sum >> 16);
  }
  return true;
}
__device__ __forceinline__ void append_listed(const BlockListRanges& parts,
                                              const MissingLists& missing, bool listed, bool full,
                                              int64_t position) {
  const unsigned all = __ballot_sync(kAllLanes, listed);
  const unsigned seconds = __ballot_sync(kAllLanes, listed && full);
  const unsigned same = full ? seconds : all & ~seconds;
  uint32_t preceding = 0;
#pragma unroll
  for (unsigned w = 0; w < kThreads / kWarp; ++w) {
    if (w < threadIdx.x / kWarp) preceding += parts.of_warp[w];
  }
  __syncthreads();  // parts.begin is written
  if (!listed) return;
  preceding = full ? preceding >> 16 : preceding & 0xffff;
  const uint32_t at =
      parts.begin[full] + preceding + __popc(same & ((1u << threadIdx.x % kWarp) - 1));
  missing.listed(full, at) = static_cast<uint32_t>(position);
}

// Number of entries of a shared list that a warp takes in a turn, so that the work of the warps is
// balanced. A multiple of `multiple`.
__device__ __forceinline__ int even_lanes(int64_t number, int multiple) {
  const int64_t warps = static_cast<int64_t>(gridDim.x) * (kThreads / kWarp);
  const int64_t turns = (number + warps * kWarp - 1) / (warps * kWarp);
  const int64_t each = turns == 0 ? 0 : (number + warps * turns - 1) / (warps * turns);
  return static_cast<int>((each + multiple - 1) / multiple * multiple);
}

// Divides a list among the warps of a grid. In each turn the first lanes of a warp have one entry
// each.
struct WarpEvenShare {
  int64_t number;
  int64_t begin;   // of the warp's part of the list
  int64_t stride;  // to the next turn
  int lanes;       // lanes with an entry, in every turn but the last

  __device__ __forceinline__ explicit WarpEvenShare(int64_t list_number, int lanes_used = kWarp)
      : number(list_number), lanes(lanes_used) {
    constexpr int kWarps = kThreads / kWarp;
    const auto warp = static_cast<int64_t>(blockIdx.x * kWarps + threadIdx.x / kWarp);
    begin = warp * lanes;
    stride = static_cast<int64_t>(gridDim.x) * kWarps * lanes;
  }
  __device__ __forceinline__ bool more() const { return begin < number; }
  __device__ __forceinline__ void next() { begin += stride; }
  // How many of the warp's first lanes have an entry in this turn.
  __device__ __forceinline__ int busy() const {
    return number - begin < lanes ? static_cast<int>(number - begin) : lanes;
  }
  __device__ __forceinline__ int64_t at() const { return begin + threadIdx.x % kWarp; }
};

// Adds `each` to a counter of the table of each `wanted` lane, by one atomic for each warp and
// table.
__device__ __forceinline__ void count_warp(const TableView* table, Counter counter, bool wanted,
                                           int64_t each = 1) {
  unsigned remaining = __ballot_sync(kAllLanes, wanted);
  while (remaining) {
    const int first = __ffs(static_cast<int>(remaining)) - 1;
    const auto address = __shfl_sync(kAllLanes, reinterpret_cast<uint64_t>(table), first);
    const unsigned peers =
        __ballot_sync(kAllLanes, wanted && reinterpret_cast<uint64_t>(table) == address);
    if (threadIdx.x % kWarp == static_cast<unsigned>(first)) {
      count(*table, counter, each * __popc(peers));
    }
    remaining &= ~peers;
  }
}

}  // namespace torchrec_hkv::hash_table::cuda
