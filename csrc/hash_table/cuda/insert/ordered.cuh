// Insertion on the GPU in the order of the batch, as a CPU does it: which ids get a place, and
// which, follows from the table and the batch alone. In place of insert_kernel and what evicts.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "hash_table/cuda/insert/missing.cuh"
#include "hash_table/cuda/small_sort.cuh"

namespace torchrec_hkv::hash_table::cuda {

// Scratch of an insertion, memory of which nothing is known before. Missing ids are numbered in the
// order of their first positions. What places them waits in *queues*: those of one bucket in one
// queue, which several buckets may share.
struct InsertionOrder {
  char* zeros;  // of all down to the blocks' order: zeroed where an id is missing
  size_t zero_bytes;
  uint32_t* number;   // of missing ids
  uint32_t* places;   // twice that: each waits in the queues of its two buckets
  uint32_t* next;     // number of the first missing id that nobody has in hand
  uint32_t* leaving;  // ids that leave, listed
  SmallSort sort;
  BlockOrder blocks;
  uint32_t* positions;  // by number: where the id first stands
  uint8_t* fates;       // by number: a Fate
  SortedPairs pairs;    // [places] queue, and 2 * number + which bucket
  int queue_bits;
  // By position, null where nobody wants them:
  unsigned long long*
      highest;        // score that is given for the id, at the position that stands for it
  int64_t* left_ids;  // whose place the id has taken
  uint64_t* left_scores;
  bool* replaced;                      // whether it has taken one
  unsigned long long* leavers_before;  // this listing's
  size_t bytes;

  // When places are sorted: where in the sorted order each is, and, by queue, who has its turn.
  __host__ __device__ uint32_t* tickets() const {
    return static_cast<uint32_t*>(pairs.other.values);
  }
  __host__ __device__ uint32_t* turns() const { return static_cast<uint32_t*>(pairs.other.keys); }
  // Then, the positions of leavers that are listed.
  __host__ __device__ uint32_t* listed() const {
    return static_cast<uint32_t*>(pairs.pairs.values);
  }
};

// scored: whether scores are given. base: aligned to 256 bytes.
InsertionOrder insertion_order(int64_t num_ids, const Placement& placement, bool scored,
                               char* base);

// Places what a find has missed, counts it, and writes its rows; slots of other positions of these
// ids are left to resolve_kernel.
void insert_in_order(const TableView* tables, const Batch& batch, const Visit& visit,
                     const Placement& placement, int64_t* slots, const Missing& missing,
                     InsertionOrder* order, cudaStream_t stream);

// Where leavers are wanted, after all positions have their slots: those whose place others have
// taken and those that are refused, in the order of the batch, then those that are not admitted. In
// ordered_leavers.cu, as the next.
void write_leavers_in_order(const TableView* tables, const Batch& batch, const Visit& visit,
                            const Placement& placement, const int64_t* slots,
                            const InsertionOrder& order, cudaStream_t stream);

// Remembers what insert_in_order has evicted: of several that share an entry the last.
void remember_in_order(const TableView* tables, const Batch& batch, const Missing& missing,
                       const InsertionOrder& order, cudaStream_t stream);

}  // namespace torchrec_hkv::hash_table::cuda
