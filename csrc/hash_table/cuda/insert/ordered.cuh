// Insertion on the GPU in the order of the batch, as on a CPU: the slots depend on the table and
// the batch only. Replaces insert_kernel and the eviction.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "hash_table/cuda/insert/missing_lists.cuh"
#include "hash_table/cuda/small_sort.cuh"

namespace torchrec_hkv::hash_table::cuda {

// Scratch of an insertion, uninitialised. Missing ids are numbered in the order of their first
// positions. Each waits in the queues of its two buckets. Several buckets may share a queue.
struct InsertionOrder {
  char* zeros;  // the arrays from `number` to `blocks`, zeroed if an id is missing
  size_t zero_bytes;
  uint32_t* number;       // of missing ids
  uint32_t* places;       // twice that, because each id waits in the queues of its two buckets
  uint32_t* next;         // the first id that no tile has taken
  uint32_t* num_evicted;  // number of listed entries
  SmallSort sort;
  LookbackState blocks;
  uint32_t* positions;  // by number: first position of the id
  uint8_t* outcomes;    // by number: a ClaimOutcome
  SortedPairs pairs;    // [places] queue; 2 * number + 0 or 1 for the bucket
  int queue_bits;
  // By position; null if not wanted:
  unsigned long long* highest;  // highest score given for the id, at its first position
  int64_t* evicted_ids;         // id of the entry that the id has replaced
  uint64_t* evicted_scores;
  bool* replaced;                      // whether the id has replaced an entry
  unsigned long long* evicted_before;  // number of entries in earlier listings
  size_t bytes;

  // After the sort. tickets: index of each place in the sorted order. turns: by queue, the ticket
  // whose turn it is.
  __host__ __device__ uint32_t* tickets() const {
    return static_cast<uint32_t*>(pairs.other.values);
  }
  __host__ __device__ uint32_t* turns() const { return static_cast<uint32_t*>(pairs.other.keys); }
  // While evicted entries are listed: their positions.
  __host__ __device__ uint32_t* listed() const {
    return static_cast<uint32_t*>(pairs.pairs.values);
  }
};

// The queue of a bucket.
__device__ __forceinline__ uint32_t queue_of(const InsertionOrder& order, const TableView& table,
                                             uint32_t bucket) {
  const auto number =
      static_cast<uint64_t>(table.first_slot + static_cast<int64_t>(bucket) * table.bucket_slots);
  return static_cast<uint32_t>(number * 0x9e3779b97f4a7c15ull >> (64 - order.queue_bits));
}

// scored: whether scores are given. base: aligned to 256 bytes.
InsertionOrder insertion_order(int64_t num_ids, const Placement& placement, bool scored,
                               char* base);

// Places the missing ids of a find, counts them, and writes their rows. resolve_kernel writes the
// slots of the other positions of these ids.
void insert_in_order(const TableView* tables, const Batch& batch, const CallContext& context,
                     const Placement& placement, int64_t* slots, const MissingLists& missing,
                     InsertionOrder* order, cudaStream_t stream);

// The step of insert_in_order that selects the slots, one id after the other in each queue (in
// ordered_place.cu).
void place_in_order(const TableView* tables, const Batch& batch, const CallContext& context,
                    RefuseLower refuse_lower, int64_t* slots, const MissingLists& missing,
                    const InsertionOrder& order, cudaStream_t stream);

// Called after all positions have their slots. Lists evicted and refused entries in the order of
// the batch, then ids that were not admitted (in ordered_evicted.cu).
void write_evicted_in_order(const TableView* tables, const Batch& batch, const CallContext& context,
                            const Placement& placement, const int64_t* slots,
                            const InsertionOrder& order, cudaStream_t stream);

// Remembers the ids that insert_in_order has evicted. Of several that share an entry, the last one
// stays (in ordered_evicted.cu).
void remember_in_order(const TableView* tables, const Batch& batch, const MissingLists& missing,
                       const InsertionOrder& order, cudaStream_t stream);

}  // namespace torchrec_hkv::hash_table::cuda
